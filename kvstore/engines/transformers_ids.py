"""Token ids as programs have them: lists, tensors, arrays, or what a tokenizer returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvsnap.formats.errors import BadTokenIds, UsageError
from kvsnap.formats.names import TokenIds, token_array

_ONE = "give one; save takes row=0, 1, …"
_GIVE = "give a list or a tensor of integers, as the model's tokenizer gives them"


def sequence_of(token_ids: Any) -> TokenIds:
    """Ids of one sequence: [tokens] or [1, tokens]."""
    found = _plain(token_ids)
    if isinstance(found, list) and found and isinstance(found[0], list):
        if len(found) > 1:
            raise UsageError(f"{len(found)} sequences were given", _ONE)
        found = found[0]
    if isinstance(found, np.ndarray) and found.ndim == 2:
        if len(found) != 1:
            raise UsageError(f"{len(found)} sequences were given", _ONE)
        found = found[0]
    if isinstance(found, np.ndarray) and (found.ndim != 1 or found.dtype.kind not in "iu"):
        raise BadTokenIds(f"token ids of {found.dtype} {found.shape} are no sequence", _GIVE)
    return token_array(found)


def matrix_of(values: Any) -> np.ndarray:
    """Ids, or a mask, of a batch: [rows, tokens]."""
    try:
        found = np.asarray(_plain(values))
    except ValueError as error:
        raise UsageError(
            "the rows of the batch have different lengths", "pad on the left"
        ) from error
    if found.ndim not in (1, 2) or found.dtype.kind not in "iubf":
        raise UsageError(f"an array of {found.dtype} {found.shape} is no batch", _GIVE)
    return found[None] if found.ndim == 1 else found


def _plain(values: Any) -> Any:
    """Without tensors, and without what a tokenizer wraps ids in."""
    if isinstance(values, Mapping) and "input_ids" in values:
        values = values["input_ids"]
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise UsageError("there are no token ids", _GIVE)
    if isinstance(values, list | tuple) and values and isinstance(values[0], torch.Tensor):
        return [value.tolist() for value in values]
    return values
