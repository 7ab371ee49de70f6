"""Codes times scales: how q8 and q4 make rows of int8 codes, and scales of rows.

A value is code * scale in float32, rounded to the element type. A scale has few significant bits,
so that the product has at most the 24 of float32 (BF16, F32) or the 11 of float16 (F16) and is
exact; only BF16 rounds, to nearest even. Every implementation gives the same bits.

    F16         U8: a byte, five bits of exponent and three of mantissa, see `SCALES`
    BF16, F32   BF16

numpy converts float32 to float16 at 0.8 GB/s. Exact products need no rounding: multiplied by 2^-112
their exponents are those of float16, thirteen bits higher, subnormals included. Layers are taken
together, so that calls are few.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvsnap.formats.codecs import compiled
from kvsnap.formats.codecs.stored import Scratch
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array

LARGEST_CODE = 127
GROUP = 64
"""Tokens that share a channel's scale, at most."""
_BYTE = np.arange(256)
SCALES: Array = np.ldexp(
    np.where(_BYTE < 8, _BYTE, 8 + _BYTE % 8).astype(np.float32), np.maximum(_BYTE >> 3, 1) - 25
)
"""Byte → scale of F16 rows. A half without its sign and last 7 bits, divided by 128: the smallest is
2^-24, of which every half is a multiple, and 127 times the largest one needed (290) does not
overflow."""
_END = {1: 0xF8, 2: 0x7C00}
"""By item size: scales from here on are infinite, negative or make products overflow: no encoder writes them."""
_CHUNK = 393_216
"""Elements a call: 1.5 MiB of float32. On the bundled model's blocks 3.1 GB/s of halves; of six
layers a call 2.7, of one 1.4."""
_TINY: Array = np.full(4, 2.0**-120, np.float32)
_SCRATCH = Scratch()


def scale_type(dtype: str) -> str:
    return "U8" if dtype == "F16" else "BF16"


def scales_above(dtype: str, highest: Array) -> Array:
    """The smallest storable scales whose 127-fold is at least `highest` (float32, not negative), as
    stored. Zero only where `highest` is."""
    wanted = highest / np.float32(LARGEST_CODE)
    if dtype == "F16":
        return np.searchsorted(SCALES[: _END[1]], wanted).astype(np.uint8)
    bits = ((wanted.view(np.uint32) + 0xFFFF) >> 16).astype(np.uint16)
    return np.maximum(bits, highest > 0)  # a quotient of subnormals can be zero


def check_scales(suffix: str, stored: Array) -> None:
    """`Damaged` unless these are scales that an encoder can have stored."""
    if stored.size and stored.max() >= _END[stored.itemsize]:
        raise Damaged(f"tensor {suffix} has an impossible scale")


def scale_values(stored: Array) -> Array:
    """Stored scales as float32."""
    if stored.dtype == np.uint8:
        return SCALES.take(stored)
    return (stored.astype(np.uint32) << 16).view(np.float32)


def magnitudes(rows: Array) -> Array:
    """Element bits without the sign. They order as the values do."""
    found: Array = rows & rows.dtype.type((1 << 8 * rows.itemsize - 1) - 1)
    return found


def widen(dtype: str, rows: Array) -> Array:
    """Element bits as float32, exactly; of F16, finite ones only."""
    if dtype == "F16" and _flushes():
        return rows.view(np.float16).astype(np.float32)
    if dtype == "F16":  # numpy's own conversion runs at 1.2 GB/s
        bits = rows.view(np.int16).astype(np.int32)
        np.left_shift(bits, 13, out=bits)
        np.bitwise_and(bits, np.int32(~0x70001FFF), out=bits)
        values = bits.view(np.float32)
        return np.multiply(values, np.float32(2.0**112), out=values)
    if dtype == "BF16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.float32)


def _flushes() -> bool:
    """Whether this thread's processor takes subnormals of float32 as zero: torch and some libraries
    set it so. Then 2^-112 would make zeros of small halves; numpy's conversions do not, slower."""
    return not (_TINY * np.float32(2.0**-20)).any()


def narrow(dtype: str, values: Array) -> Array:
    """float32 to element bits, to nearest even; what is too large becomes infinite. Of BF16 the
    values' memory is used up."""
    if dtype == "F32":
        return values.view(np.uint32)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16)


def chunks(layers: int, tokens: int, width: int) -> Iterator[tuple[slice, slice, int]]:
    """Layers and tokens to take together, and the number of the tokens' group."""
    for first in range(0, tokens, GROUP):
        group = min(GROUP, tokens - first)
        some = max(1, min(group, _CHUNK // width))
        many = max(1, _CHUNK // (some * width))
        for token in range(first, first + group, some):
            for layer in range(0, layers, many):
                last = min(token + some, first + group)
                yield slice(layer, layer + many), slice(token, last), first // GROUP


def write_products(
    dtype: str, codes: Array, scale: Array, out: Array, factor: Array | None = None
) -> None:
    """out = codes * scale * factor. Codes int8 [layers, tokens, heads, dim]; scales, and factors
    that are powers of two, float32 that broadcast; out bits of `dtype` [layers, tokens, heads *
    dim], rows contiguous."""
    if dtype == "F16" and _flushes():
        halves = codes * (scale if factor is None else scale * factor)
        np.copyto(out, halves.astype(np.float16).view(np.uint16).reshape(out.shape))
        return
    kernels = compiled.kernels()
    if kernels is not None:
        steps = np.ascontiguousarray(scale if factor is None else scale * factor)
        made = _SCRATCH.take(out.nbytes).view(out.dtype)
        kernels[dtype](np.ascontiguousarray(codes), steps, made.reshape(codes.shape))
        np.copyto(out, made.reshape(out.shape))
        return
    size, shape = codes.size, codes.shape
    memory = _SCRATCH.take(8 * size)
    bits = memory[: 4 * size].view(np.uint32)
    product = bits.view(np.float32).reshape(shape)
    np.copyto(product, codes)
    if dtype == "F16":
        scale = scale * np.float32(2.0**-112)
    np.multiply(product, scale, out=product)
    if factor is not None:
        np.multiply(product, factor, out=product)
    if dtype == "F16":
        half, sign = memory[4 * size :].view(np.uint16).reshape(2, size)
        np.right_shift(bits, 13, out=bits)
        np.copyto(half, bits, casting="unsafe")
        np.copyto(sign.view(np.int16), codes.reshape(size))
        np.bitwise_and(sign, np.uint16(0x8000), out=sign)
        np.bitwise_or(half.reshape(out.shape), sign.reshape(out.shape), out=out)
        return
    if dtype == "BF16":
        odd = memory[4 * size :].view(np.uint32)
        np.right_shift(bits, 16, out=odd)
        np.bitwise_and(odd, np.uint32(1), out=odd)
        np.add(bits, odd, out=bits)
        np.add(bits, np.uint32(0x7FFF), out=bits)
        np.right_shift(bits, 16, out=bits)
    np.copyto(out, bits.reshape(out.shape), casting="unsafe")
