"""A codec fills the caller's array where it lies: strided, transposed, or a part of a larger one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.formats.codecs import CODECS, Stretch, get_codec
from kvsnap.formats.layout import Plane

LAYERS, TOKENS, WIDTH = 2, 8, 12
LOSSLESS = [codec for codec in CODECS if not get_codec(codec).lossy]
"""The suite in kvsnap.testing does the same for all."""
GUARD = 0xA5


def token_slice(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Eight tokens out of forty, as a block in the buffer of a whole prompt."""
    buffer = np.full((LAYERS, 40, WIDTH), GUARD, dtype)
    return buffer, buffer[:, 16:24]


def strided(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.full((LAYERS, 2 * TOKENS, 2 * WIDTH), GUARD, dtype)
    return buffer, buffer[:, ::2, 1::2]


def transposed(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """llama.cpp's V without flash attention: [row, tokens]."""
    buffer = np.full((LAYERS, WIDTH, TOKENS), GUARD, dtype)
    return buffer, buffer.transpose(0, 2, 1)


def reversed_tokens(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    buffer = np.full((LAYERS, TOKENS, WIDTH), GUARD, dtype)
    return buffer, buffer[:, ::-1]


def unaligned(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A state's headers move its rows to odd addresses."""
    size = LAYERS * TOKENS * WIDTH * dtype.itemsize
    buffer = np.full(size + 3, GUARD, np.uint8)
    return buffer, buffer[3:].view(dtype).reshape(LAYERS, TOKENS, WIDTH)


VIEWS = (token_slice, strided, transposed, reversed_tokens, unaligned)


@pytest.mark.parametrize("codec", LOSSLESS)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32", "U8"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_rows_land_in_the_view_and_nowhere_else(
    codec: str, dtype: str, view: Callable[[np.dtype], tuple[np.ndarray, np.ndarray]]
) -> None:
    plane = Plane(name="v", kind="elements", dtype=dtype, row=(3, 4))
    rows = np.random.default_rng(1).integers(
        0, 2 ** (8 * plane.itemsize), (LAYERS, TOKENS, WIDTH), plane.memory_dtype
    )
    buffer, out = view(plane.memory_dtype)
    before, outs_own = buffer.copy(), out.copy()
    get_codec(codec).decode(
        Stretch("full.k", plane, 0), get_codec(codec).encode(Stretch("full.k", plane, 0), rows), out
    )
    assert np.array_equal(out, rows)
    out[...] = outs_own
    assert np.array_equal(buffer, before)


@pytest.mark.parametrize("codec", LOSSLESS)
def test_an_unaligned_file_buffer_decodes(codec: str) -> None:
    # Tensors lie end to end: a group of odd size moves all that follow to odd addresses.
    plane = Plane(name="k", kind="elements", dtype="F32", row=(1, 4))
    rows = np.arange(8, dtype=np.uint32).reshape(1, 2, 4)
    stored = {}
    for suffix, tensor in get_codec(codec).encode(Stretch("full.k", plane, 0), rows).items():
        moved = b"\xff" + bytes(memoryview(tensor.data).cast("B"))
        stored[suffix] = type(tensor)(tensor.dtype, tensor.shape, memoryview(moved)[1:])
    out = np.zeros_like(rows)
    get_codec(codec).decode(Stretch("full.k", plane, 0), stored, out)
    assert np.array_equal(out, rows)
