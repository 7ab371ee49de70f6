"""`uniform.write_products` compiled by numba: one pass instead of seven, the same bits.

Importing numba takes 0.5 to 1 s, compiling as long again, and in some processes it does harm: it is
used only where the environment variable KVSNAP_COMPILED is 1, and only if it is installed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from kvsnap.formats.layout import Array

VARIABLE = "KVSNAP_COMPILED"


@functools.cache
def kernels() -> Mapping[str, Callable[[Array, Array, Array], None]] | None:
    """Element type → kernel(codes, scale, out), all [layers, tokens, heads, dim] but `out`, which
    is [layers, tokens, heads * dim]. None: numpy does it."""
    if os.environ.get(VARIABLE) != "1":
        return None
    try:
        numba: Any = import_module("numba")
    except ImportError:
        return None
    return {dtype: _compile(numba, dtype) for dtype in ("F16", "BF16", "F32")}


def _compile(numba: Any, dtype: str) -> Any:
    shift = np.float32(2.0**-112)

    def narrow(bits: Any) -> Any:
        if dtype == "F16":
            return np.uint16(
                ((bits >> np.uint32(13)) & 0x7FFF) | ((bits >> np.uint32(16)) & 0x8000)
            )
        if dtype == "BF16":
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            return np.uint16((bits + odd + np.uint32(0x7FFF)) >> np.uint32(16))
        return bits

    factor = shift if dtype == "F16" else np.float32(1)
    narrow = numba.njit(nogil=True)(narrow)

    def write(codes: Array, scale: Array, out: Array) -> None:
        layers, tokens, heads, dim = codes.shape
        row = np.empty(dim, np.float32)
        bits = row.view(np.uint32)
        for layer in range(layers):
            for token in range(tokens):
                for head in range(heads):
                    for i in range(dim):
                        value = np.float32(codes[layer, token, head, i])
                        row[i] = value * (scale[layer, token, head, i] * factor)
                    for i in range(dim):
                        out[layer, token, head * dim + i] = narrow(bits[i])

    return numba.njit(nogil=True)(write)
