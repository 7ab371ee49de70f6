"""One row of a batch as a sequence of its own, its left padding taken off.

A padded row's KV is that of the sequence alone only if positions counted from its first token and
the padding was masked, as `generate()` does it and a bare forward does not; and beam search leaves
rows in a cache that are not those of the sequences it gives. Nothing in a cache says so. So a row is
computed again, alone, and compared, which costs a prefill of it: no row gets another one's name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import DynamicCache

from kvsnap.engines.transformers_cache import CacheRows
from kvsnap.engines.transformers_ids import matrix_of
from kvsnap.engines.transformers_layers import make_cache
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.names import TokenIds, token_array


def row_of(rows: int, token_ids: Any, row: int, mask: Any) -> tuple[TokenIds, int]:
    """(ids, padding): the ids of one row without its left padding, and how many ids that were.

    Raises `UsageError` where it is not told which tokens of a batch are padding, `Unsupported` for
    padding that is not on the left."""
    ids = matrix_of(token_ids)
    is_number = isinstance(row, int | np.integer)
    if not is_number or not 0 <= row < len(ids) or len(ids) != rows:
        raise UsageError(
            f"row {row!r} of {len(ids)} sequences, and the cache holds {rows}",
            "give token_ids [rows, tokens] of the whole batch, and one of its rows",
        )
    if mask is None:
        raise UsageError(
            "nobody told which tokens of the batch are padding",
            "give the attention_mask that the model was given",
        )
    ones = matrix_of(mask)
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
    for tag in ("_kvsnap_marks", "_kvsnap_model"):
        if hasattr(cache, tag):
            setattr(alone, tag, getattr(cache, tag))
    for group in rows.groups:
        for number in group.numbers:
            source, target = cache.layers[number], alone.layers[number]
            keys, values = (t.detach()[row : row + 1] for t in (source.keys, source.values))
            target.lazy_initialization(keys, values)
            target.keys, target.values = keys[:, :, padding:], values[:, :, padding:]
    return alone
