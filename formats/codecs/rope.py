"""RoPE undone and done again: keys without their positions, for codecs that know channels.

Rotated channels mix two of the model's by an angle that the position sets, so that what is known of
a channel (its spread, what an error in it costs) holds before the rotation only.
"""

from __future__ import annotations

import functools

import numpy as np

from kvsnap.formats.layout import Array, PlaneRope


def rotate(rope: PlaneRope, values: Array, start: int, back: bool = False) -> None:
    """Turn float32 [layers, tokens, heads, dim] in place, the first token being at position
    `start`; `back` undoes it."""
    sine, cosine = _angles(rope, start, values.shape[1])
    if back:
        sine = -sine
    first, second = pairs(rope, values)
    turned = first * cosine
    turned -= second * sine
    np.multiply(second, cosine, out=second)
    second += first * sine
    first[...] = turned


def pairs(rope: PlaneRope, values: Array) -> tuple[Array, Array]:
    """Views of the first and second elements of all pairs, [..., dims / 2] each."""
    if rope.pairing == "interleaved":
        return values[..., 0 : rope.dims : 2], values[..., 1 : rope.dims : 2]
    half = rope.dims // 2
    return values[..., :half], values[..., half : rope.dims]


@functools.lru_cache(maxsize=8)
def _angles(rope: PlaneRope, start: int, tokens: int) -> tuple[Array, Array]:
    """Sine and cosine, float32 [tokens, 1, dims / 2], of angles computed in float64."""
    speed = rope.scale * rope.base ** (-np.arange(0, rope.dims, 2) / rope.dims)
    angles = np.outer(np.arange(start, start + tokens, dtype=np.float64), speed)[:, None]
    return np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
