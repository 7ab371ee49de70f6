"""Inner loops compiled by numba: one pass where numpy needs three or seven, the same bits.

Codes times scales run at 7 GB/s of halves where numpy has 3. Importing numba takes about 1 s and
compiling some more, and in some processes it does harm: it is used only where `allow` was called, and
only if it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from kvsnap.formats.layout import Array

_allowed = False


def allow() -> None:
    """Use numba in this process from now on."""
    global _allowed
    _allowed = True
    for cached in (joiner, kernels):
        cached.cache_clear()


@functools.cache
def joiner() -> Callable[[Array, Array, Array], None] | None:
    """join(low, high, out): bytes to 16-bit elements, all flat. None: numpy does it."""
    numba = _numba()
    if numba is None:
        return None

    def join(low: Array, high: Array, out: Array) -> None:
        for i in range(len(out)):
            out[i] = np.uint16(low[i]) | (np.uint16(high[i]) << np.uint16(8))

    compiled: Callable[[Array, Array, Array], None] = numba.njit(nogil=True)(join)
    return compiled


@functools.cache
def kernels() -> Mapping[str, Callable[[Array, Array, Array], None]] | None:
    """Element type → kernel(codes, scale, out), all C-contiguous and [layers, tokens, heads, dim],
    where scale has one token or all, and one element of a head or all. None: numpy does it."""
    numba = _numba()
    if numba is None:
        return None
    return {dtype: _compile(numba, dtype) for dtype in ("F16", "BF16", "F32")}


def _numba() -> Any:
    if not _allowed:
        return None
    try:
        return import_module("numba")
    except ImportError:
        return None


def _compile(numba: Any, dtype: str) -> Any:
    factor = np.float32(2.0**-112 if dtype == "F16" else 1)

    def narrow(bits: Any) -> Any:
        if dtype == "F16":
            return ((bits >> np.uint32(13)) & np.uint32(0x7FFF)) | (
                (bits >> np.uint32(16)) & np.uint32(0x8000)
            )
        if dtype == "BF16":
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return (bits + odd + np.uint32(0x7FFF)) >> np.uint32(16)
        return bits

    narrow = numba.njit(nogil=True, inline="always")(narrow)

    def write(codes: Array, scale: Array, out: Array) -> None:
        layers, tokens, heads, dim = codes.shape
        steps = np.empty(dim, np.float32)
        row = np.empty(dim, np.float32)
        bits = row.view(np.uint32)
        for layer in range(layers):
            for token in range(tokens):
                for head in range(heads):
                    own = scale[layer, min(token, scale.shape[1] - 1), head]
                    for i in range(dim):
                        steps[i] = own[i] if len(own) == dim else own[0]
                    given, made = codes[layer, token, head], out[layer, token, head]
                    for i in range(dim):
                        row[i] = np.float32(given[i]) * (steps[i] * factor)
                    for i in range(dim):
                        made[i] = narrow(bits[i])

    return numba.njit(nogil=True)(write)
