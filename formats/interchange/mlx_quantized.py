"""mlx's affine quantization, as mlx-lm's QuantizedKVCache holds K and V.

    data      U32 [batch, heads, rows, head_dim * bits / 32], elements from the lowest bits up
    scales    [batch, heads, rows, head_dim / group_size], in the model's type
    biases    as scales
    value     scale * q + bias, q unsigned

Source: mlx 0.32.4, `mx.quantize`; seen with 4 and 8 bits. 3, 5 and 6 bits lie across words, and were not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.heads_first import SAFETENSORS_TYPES, one_type
from kvsnap.formats.interchange.safetensors_file import ForeignTensor
from kvsnap.formats.layout import Array

_BITS = (2, 4, 8)
_AXES = 4


def quantized_rows(parts: Sequence[ForeignTensor]) -> int:
    """How many rows data, scales and biases hold. `Damaged` where they are not of one another."""
    shapes = {part.shape[:-1] for part in parts}
    if len(parts[0].shape) != _AXES or len(shapes) != 1:
        raise Damaged("data, scales and biases of a quantized cache have different shapes")
    return parts[0].shape[2]


def dequantized(parts: Sequence[ForeignTensor], rows: int, told: Mapping[str, int]) -> Array:
    """float32 [batch, heads, rows, head_dim] of the first rows of data, scales and biases.

    `told`: bits and group_size, which must agree with the shapes."""
    data, scales, biases = parts
    bits, group = told["bits"], told["group_size"]
    if bits not in _BITS:
        raise Unsupported(f"a cache quantized to {bits} bits", "known are 2, 4 and 8 bits")
    if data.dtype != "U32":
        raise Damaged(f"a quantized cache's data are U32, not {data.dtype}")
    each = 32 // bits
    width = data.shape[-1] * each
    if group < 1 or scales.shape != biases.shape or scales.shape[-1] * group != width:
        raise Damaged(
            f"heads of {width} elements are not {scales.shape[-1]} groups of {group}, as the file says"
        )
    words = data.array()[:, :, :rows, :, np.newaxis]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = ((words >> shifts) & np.uint32(2**bits - 1)).astype(np.float32)
    grouped = codes.reshape(*codes.shape[:3], scales.shape[-1], group)
    # The product is exact with f16 and bf16 scales (11 + 8 bits), so the sum is rounded once.
    with np.errstate(all="ignore"):  # a file may hold infinities
        found = grouped * _f32(scales, rows) + _f32(biases, rows)
    return found.reshape(*found.shape[:3], width)


def in_type(values: Array, name: str) -> Array:
    """float32 values as the bits of a type, rounded to nearest, ties to even."""
    if name == "f32":
        return values.view(np.uint32)
    if name == "f16":
        with np.errstate(all="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)  # a NaN's upper bits alone could be those of infinity
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _f32(tensor: ForeignTensor, rows: int) -> Array:
    name = one_type([tensor.dtype], SAFETENSORS_TYPES)
    bits = tensor.array()[:, :, :rows, :, np.newaxis]
    if name == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(bits).view(f"<f{bits.itemsize}").astype(np.float32)
