"""Tokens that a lossy codec keeps exactly, bit for bit: their list and their rows beside the codes.

Kept are the first four tokens of a sequence, and every token with a value in any layer that no code
can stand for. The first tokens are attention sinks: every later token attends to them, and their
rows look like no other's. With them coded as well, q4 lost three times as much (KL of next-token
distributions 8.0e-3, not 2.6e-3: two texts, bundled model). Kept tokens are coded as zero and stay
out of the statistics that scales are made of; decoding writes their rows last, over the zeros.

    .kept    U32 [n]                               tokens of the block, rising
    .exact   element type [layers, n, heads, dim]  their rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kvsnap.formats.codecs.base import Stretch
from kvsnap.formats.codecs.stored import read
from kvsnap.formats.codecs.uniform import magnitudes
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array

SINKS = 4
NAMES = (".exact", ".kept")

LARGEST = {"F16": 2.0**15, "BF16": 2.0**127, "F32": 2.0**127}
"""Half of the type's range: the multiples of a scale nearest to a larger value could overflow."""
_LARGEST_BITS = {"F16": 0x7800, "BF16": 0x7F00, "F32": 0x7F000000}
"""The same as bits. Beyond them are infinities and NaN: magnitudes order as their bits do."""


def kept_tokens(at: Stretch, rows: Array) -> Array:
    """bool [tokens]: sinks, and tokens with a value beyond half of the type's range, or NaN."""
    kept = np.arange(at.start, at.start + rows.shape[1]) < SINKS
    for layer in rows:
        kept |= magnitudes(layer).max(axis=1) > _LARGEST_BITS[at.plane.dtype]
    return kept


def without(rows: Array, kept: Array) -> Array:
    """Rows with zeros where tokens are kept."""
    if kept.any():
        rows = rows.copy()
        rows[:, kept] = 0
    return rows


def store(at: Stretch, rows: Array, kept: Array) -> dict[str, Tensor]:
    """The tensors of the kept tokens; none where there are none, unless all are kept."""
    tokens = np.flatnonzero(kept).astype("<u4")
    if not len(tokens) and len(kept):
        return {}
    shape = at.plane.file_shape(len(rows), len(tokens))
    exact = np.ascontiguousarray(rows[:, tokens])
    return {
        ".exact": Tensor(at.plane.dtype, shape, exact),
        ".kept": Tensor("U32", tokens.shape, tokens),
    }


def restore(at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
    """Write the kept tokens' rows over `out`; `Damaged` unless the list fits its tokens."""
    kept, exact = kept_rows(at, stored, out.shape[:2])
    if len(kept):
        out[:, kept] = exact


def kept_rows(
    at: Stretch, stored: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Array, Array]:
    """The tokens that are kept, int64 [n], and their rows [layers, n, width]; none where there is no
    list. `shape`: layers and tokens of the block. `Damaged` unless the list fits it."""
    layers, tokens = shape
    width = math.prod(at.plane.row)
    if ".kept" not in stored:
        return np.empty(0, np.int64), np.empty((layers, 0, width), at.plane.memory_dtype)
    count = stored[".kept"].shape[0] if len(stored[".kept"].shape) == 1 else tokens + 1
    if count > tokens:
        raise Damaged("more tokens are kept exactly than the block has")
    kept = read(stored, ".kept", "U32", (count,)).astype(np.int64)
    exact = read(stored, ".exact", at.plane.dtype, at.plane.file_shape(layers, count))
    if count and (kept[-1] >= tokens or (np.diff(kept) <= 0).any()):
        raise Damaged("the list of tokens that are kept exactly is not a rising one of the block's")
    if ".codes" not in stored and count != tokens:
        raise Damaged("some tokens are neither coded nor kept exactly")
    return kept, exact.reshape(layers, count, width)
