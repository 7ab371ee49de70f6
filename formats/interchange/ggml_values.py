"""Values of rows in ggml's types, as float32: to compare rows, never to store them.

Quantized blocks of 32 elements (ggml-common.h, `block_q8_0` and its neighbours; ggml-quants.c,
`dequantize_row_*`); d, m: f16; element j of the first half is the low four bits of byte j, of the second
half the high ones; the fifth bits stand in u32 `h`:

    q8_0    d | i8 * 32                            q * d
    q4_0    d | u8 * 16                            (q - 8) * d
    q4_1    d | m | u8 * 16                        q * d + m
    q5_0    d | h | u8 * 16                        (q - 16) * d
    q5_1    d | m | h | u8 * 16                    q * d + m
    iq4_nl  d | u8 * 16                            table[q] * d
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.ggml import ggml_type_named
from kvsnap.formats.layout import Array

_IQ4_NL = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)


def values(rows: Array, name: str) -> Array:
    """float32 [..., elements] of rows [..., row]: unsigned integers as wide as an element, or the
    bytes of quantized blocks."""
    kind = ggml_type_named(name)
    found: Array
    if name == "f32":
        found = np.ascontiguousarray(rows).view("<f4")
    elif name == "f16":
        found = np.ascontiguousarray(rows).view("<f2").astype(np.float32)
    elif name == "bf16":
        found = (rows.astype("<u4") << 16).view("<f4")
    else:
        blocks = np.ascontiguousarray(rows).reshape(*rows.shape[:-1], -1, kind.bytes)
        found = _decoded(blocks, name).reshape(*rows.shape[:-1], -1)
    return found


def are_numbers(rows: Array, name: str) -> bool:
    """Whether no value is infinite or not a number. Layer by layer, where there are several."""
    layers = rows if rows.ndim > 2 else [rows]
    return all(bool(np.isfinite(values(layer, name)).all()) for layer in layers)


def unrotated(found: Array, size: int) -> Array:
    """Undo llama.cpp's Hadamard rotation of runs of `size` elements; the matrix is its own inverse
    (src/llama-kv-cache.cpp, `build_input_k_rot`)."""
    if not size:
        return found
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned: Array = found.reshape(-1, size) @ (matrix / np.float32(np.sqrt(size)))
    return turned.reshape(found.shape)


def _decoded(blocks: Array, name: str) -> Any:
    scale = _f16(blocks, 0)
    if name == "q8_0":
        return scale * blocks[..., 2:34].view(np.int8).astype(np.float32)
    low, high = blocks[..., -16:] & 15, blocks[..., -16:] >> 4
    codes = np.concatenate([low, high], axis=-1)
    if name == "iq4_nl":
        return scale * _IQ4_NL[codes]
    if name in ("q5_0", "q5_1"):
        bits = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")
        codes = codes | (bits << 4)
    numbers = codes.astype(np.float32)
    if name in ("q4_1", "q5_1"):
        return scale * numbers + _f16(blocks, 2)
    middle = {"q4_0": 8, "q5_0": 16}.get(name)
    if middle is None:
        raise Unsupported(f"values of type {name} are not known to kvsnap")
    return scale * (numbers - middle)


def _f16(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)
