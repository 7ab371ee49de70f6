"""One row of a batch as a sequence of its own, its left padding taken off.

A padded row's KV is that of the sequence alone only if positions counted from its first token and
the padding was masked, as `generate()` does it and a bare forward does not; and beam search leaves
rows in a cache that are not those of the sequences it gives. Nothing in a cache says so. So a row is
computed again, alone, and compared, which costs a prefill of it: no row gets another one's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache

from kvsnap.engines.transformers_cache import CacheRows
from kvsnap.engines.transformers_layers import filled, make_cache
from kvsnap.engines.transformers_probe import run
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.names import TokenIds, token_array

if TYPE_CHECKING:
    from kvsnap.engines.transformers import Transformers

_COMPARED = 8
"""Tokens that are compared at a time: one wrong one among so many shows."""
_ROUNDING = 0.1
"""Relative error of a layer's rows: batches round differently, bfloat16 by 0.02 in deep layers; a
position that is off by one, or padding that was seen, gives 0.3 and more."""


def row_of(rows: int, token_ids: Any, row: int, mask: Any) -> tuple[TokenIds, int]:
    """(ids, padding): the ids of one row without its left padding, and how many ids that were.

    Raises `UsageError` where it is not told which tokens of a batch are padding, `Unsupported` for
    padding that is not on the left."""
    ids = _matrix(token_ids)
    if not 0 <= row < len(ids) or len(ids) != rows:
        raise UsageError(
            f"row {row} of {len(ids)} sequences, and the cache holds {rows}",
            "give token_ids [rows, tokens] of the whole batch, and one of its rows",
        )
    if mask is None:
        raise UsageError(
            "nobody told which tokens of the batch are padding",
            "give the attention_mask that the model was given",
        )
    ones = _matrix(mask)
    if len(ones) != len(ids) or ones.shape[1] > ids.shape[1]:
        raise UsageError(
            f"an attention mask of {ones.shape} for token ids of {ids.shape}",
            "give the attention_mask that the model was given",
        )
    own = ones[row].astype(bool)  # tokens that were generated after it are no padding
    padding = int(own.argmax()) if own.any() else len(own)
    if not own[padding:].all():
        raise Unsupported("padding on the right or in the middle is not handled", "pad on the left")
    return token_array(ids[row, padding:]), padding


def one_row(rows: CacheRows, cache: Any, row: int, padding: int) -> DynamicCache:
    """A cache of that row alone: views of the batch's own tensors."""
    rows.check(cache)
    if rows.layout.needs_state:
        raise Unsupported(
            "rows of batches of models with sliding-window or recurrent layers are not handled",
            "save sequences of this model one by one",
        )
    alone = make_cache(rows.model)
    alone._kvsnap_marks = getattr(cache, "_kvsnap_marks", ())
    for group in rows.groups:
        for number in group.numbers:
            source, target = cache.layers[number], alone.layers[number]
            keys, values = (t.detach()[row : row + 1] for t in (source.keys, source.values))
            target.lazy_initialization(keys, values)
            target.keys, target.values = keys[:, :, padding:], values[:, :, padding:]
    return alone


def check_row(engine: Transformers, tokens: int | None = None) -> None:
    """Raise `Unsupported` unless the rows of the first `tokens` (None: of all) are those that the model
    gives to the sequence alone. Windows that lost these rows are not looked at."""
    held = engine.token_ids()
    ids = held[:tokens]
    if len(ids) == 0:
        return
    fresh = make_cache(engine.model)
    device = engine.model.get_input_embeddings().weight.device
    for start in range(0, len(ids), engine.batch_size):
        batch = ids[start : start + engine.batch_size].astype(np.int64)
        run(engine.model, torch.from_numpy(batch)[None].to(device), fresh, logits_to_keep=1)
    for number in engine.attention_layers():
        own, alone = engine.cache.layers[number], fresh.layers[number]
        if filled(own) < len(held) or filled(alone) < len(ids):
            continue
        for name in ("keys", "values"):
            here, there = getattr(own, name)[:, :, : len(ids)], getattr(alone, name)
            pairs = zip(*(torch.split(t, _COMPARED, -2) for t in (here, there)), strict=True)
            if any(_differ(one.float(), other.float()) for one, other in pairs):
                raise Unsupported(
                    "the row's KV is not that of the sequence alone",
                    "give the token ids and the attention_mask that the model was given, and"
                    " position_ids as generate() makes them; beams cannot be saved",
                )


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not float((one - other).norm()) <= _ROUNDING * float(other.norm())


def _matrix(values: Any) -> np.ndarray:
    found = (
        values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    )
    return found[None] if found.ndim == 1 else found
