"""`q4`: about four bits a value; for sessions where a small loss is worth half of the bytes of q8.

Every channel of a group of 64 tokens has a step, a fraction of its standard deviation there, and a
centre. Codes are whole steps from the centre, entropy coded (zstd level 1). Steps are twice or four
times finer for tokens whose V is half or a quarter as long as the layer's median: a short V marks a
token that many others attend to. On two texts this took a third of the loss for 1 % of bytes.
Centres are whole steps, so a value is (centre + code) * scale, which `uniform` makes exact; no step
is so fine that a code leaves int8.

On the bundled model, blocks of 64 tokens: 3.77x, KL 2.4e-3 (mean, of next-token distributions),
97.0 % equal first choices; much the same with three pairs of K channels multiplied by 30. Tried on
two texts and left out: rounding towards the centre (more loss for its bytes), finer steps for short
K (no better than a smaller step), undoing RoPE on K (28 % less loss at equal bytes, but decoding
then takes rotations and rounding).

    .codes   U8, a zstd frame of int8 [layers, tokens, heads, dim]   zero where kept exactly
    .steps   U8, a zstd frame of three arrays, one after the other:
             scales   U8 or BF16 [layers, groups, heads, dim]
             centres  int8       [layers, groups, heads, dim]        in steps of tokens not finer
             finer    U8         [layers, tokens]                    how often the step is halved
    .exact, .kept   see `escape`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from kvsnap.formats.codecs import escape
from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.codecs.stored import Scratch, check_elements, check_names, read_frame
from kvsnap.formats.codecs.uniform import (
    GROUP,
    LARGEST_CODE,
    check_scales,
    chunks,
    scale_type,
    scale_values,
    scales_above,
    widen,
    write_products,
)
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import ELEMENT_BYTES, Array

if TYPE_CHECKING:
    import torch

LEVEL = 1
"""Of zstd: on one block 3 and 9 gave 2 to 9 % more bytes."""
_CODED = (".codes", ".steps")
_FEW = 8
"""Fewer tokens than this have no statistics worth storing: they are kept."""
_V_STEP = 1.5
"""Steps of V are this much longer: with the finer ones for some tokens it loses less than K."""
_FINEST = 2
_HALVED: Array = np.array([1, 0.5, 0.25], np.float32)
_SMALLEST = {"F16": LARGEST_CODE * 2.0 ** (3 + _FINEST - 24)}
"""127 times the smallest scale of V: from here on scales, of four significant bits, are such that a
quarter of them is still a multiple of the smallest half. Below, products would be cut."""
_SCRATCH = Scratch()


@dataclass(frozen=True)
class Q4(Codec):
    """`step` is that of K, in standard deviations."""

    id = "q4"
    lossy = True

    step: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.step <= 16:
            raise Unsupported(
                f"codec q4 has no step of {self.step}", "it is in standard deviations, at most 16"
            )

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        check_elements(self.id, at)
        kept = escape.kept_tokens(at, rows)
        if not kept.all() and len(kept) >= _FEW:
            stored = {**self._code(at, rows, kept), **escape.store(at, rows, kept)}
            if sum(memoryview(tensor.data).nbytes for tensor in stored.values()) < rows.nbytes:
                return stored
        return escape.store(at, rows, np.ones_like(kept))

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        check_elements(self.id, at)
        check_names(self.id, stored, _CODED, (*_CODED, *escape.NAMES), escape.NAMES)
        if ".codes" in stored:
            layers, tokens, _ = out.shape
            scale, centre, finer = _read_steps(at, stored, layers, tokens)
            memory = _SCRATCH.take(2 * out.size).view(np.int8).reshape(2, -1)
            read_frame(stored, ".codes", memory[0].view(np.uint8))
            codes, middles = memory.reshape(2, *at.plane.file_shape(layers, tokens))
            for layer, some, group in chunks(*out.shape):
                part, middle = codes[layer, some], centre[layer, group, None]
                often, factor = finer[layer, some, None, None], None
                if often.any():
                    factor = _HALVED[often]
                    middle = np.left_shift(middle, often, out=middles[layer, some])
                np.add(part, middle, out=part)  # modulo 256, as in `_code`
                step = scale[layer, group, None]
                write_products(at.plane.dtype, part, step, out[layer, some], factor)
        escape.restore(at, stored, out)

    def decode_on(
        self, device: str, at: Stretch, stored: Mapping[str, Tensor], layers: int, tokens: int
    ) -> torch.Tensor:
        """Codes go over after zstd: half of the bytes, and they become rows there."""
        if ".codes" not in stored:
            return super().decode_on(device, at, stored, layers, tokens)
        from kvsnap.formats.codecs import on_device

        check_elements(self.id, at)
        check_names(self.id, stored, _CODED, (*_CODED, *escape.NAMES), escape.NAMES)
        sides = _read_steps(at, stored, layers, tokens)
        scale, centre, finer = (on_device.carried(part, device) for part in sides)
        codes = np.empty(at.plane.file_shape(layers, tokens), np.int8)
        read_frame(stored, ".codes", codes.reshape(-1).view(np.uint8))
        often = finer[..., None, None]
        whole = on_device.carried(codes, device)
        whole += on_device.of_tokens(centre, tokens) << often  # modulo 256
        steps = on_device.of_tokens(scale, tokens) * on_device.carried(_HALVED, device)[often.int()]
        rows = on_device.products(whole, steps, at.plane.dtype)
        kept, exact = escape.kept_rows(at, stored, (layers, tokens))
        return on_device.replaced(rows, kept, at.plane, exact)

    def max_error(self, at: Stretch, rows: Array) -> Array:
        """Half a step; for BF16, whose products are rounded, a step. Kept tokens have none."""
        kept = escape.kept_tokens(at, rows)
        bound = np.zeros(at.plane.file_shape(*rows.shape[:2]), np.float32)
        for _, layer, some, _, scale, finer in self._groups(at, rows, kept):
            bound[layer, some] = scale_values(scale) * _HALVED[finer[:, None, None]]
        bound *= np.float32((1.0 if at.plane.dtype == "BF16" else 0.5) + 2.0**-16)
        bound[:, kept] = 0
        return bound.reshape(rows.shape)

    def _code(self, at: Stretch, rows: Array, kept: Array) -> dict[str, Tensor]:
        layers, tokens, _ = rows.shape
        codes = np.empty(at.plane.file_shape(layers, tokens), np.int8)
        shape = _scale_shape(at, layers, tokens)
        scales = np.empty(shape, np.uint8 if at.plane.dtype == "F16" else np.uint16)
        centres, often = np.empty(shape, np.int8), np.empty((layers, tokens), np.int8)
        for values, layer, some, group, scale, finer in self._groups(at, rows, kept):
            step = scale_values(scale)
            step = np.where(step == 0, np.float32(1), step)
            centre = np.rint(
                values.sum(axis=0, dtype=np.float64) / (step * max(1, (~kept[some]).sum()))
            )
            centre = centre.astype(np.int8)
            steps = np.rint(values / (step * _HALVED[finer[:, None, None]])).astype(np.int8)
            codes[layer, some] = steps - np.left_shift(centre, finer[:, None, None])
            scales[layer, group], centres[layer, group], often[layer, some] = scale, centre, finer
        codes[:, kept] = 0
        sides = b"".join(part.tobytes() for part in (scales, centres, often))
        return {".codes": _frame(codes), ".steps": _frame(sides)}

    def _groups(
        self, at: Stretch, rows: Array, kept: Array
    ) -> Iterator[tuple[Array, int, slice, int, Array, Array]]:
        """Each group's values, float32 [tokens, heads, dim] with zeros where kept; its layer, its
        tokens, its number; its scales as stored and how often each token's step is halved."""
        coded, dtype, is_v = escape.without(rows, kept), at.plane.dtype, at.plane.name == "v"
        for layer in range(len(rows)):
            for first in range(0, rows.shape[1], GROUP):
                some = slice(first, first + GROUP)
                values = widen(dtype, coded[layer, some]).reshape(-1, *at.plane.row)
                finer = np.zeros(len(values), np.int8)
                if is_v:
                    finer = _finer(values, kept[some], escape.LARGEST[dtype] / 2**_FINEST)
                own = values[~kept[some]] if kept[some].any() else values
                highest = (np.abs(values) / _HALVED[finer[:, None, None]]).max(axis=0)
                if len(own):
                    step = self.step * (_V_STEP if is_v else 1)
                    spread = own.std(axis=0, dtype=np.float64) * (LARGEST_CODE * step)
                    smallest = _SMALLEST.get(dtype, 0) if is_v else 0
                    spread = np.clip(spread, smallest, escape.LARGEST[dtype])
                    spread = np.where(highest > 0, spread, 0).astype(np.float32)
                    highest = np.maximum(highest, spread)
                yield values, layer, some, first // GROUP, scales_above(dtype, highest), finer


def _finer(values: Array, kept: Array, largest: float) -> Array:
    """How often to halve the step of each token, 0, 1 or 2 (int8); never above `largest`, where
    codes would leave the range of scales."""
    length = np.sqrt(np.square(values, dtype=np.float64).sum(axis=(1, 2)))
    coded = length[~kept & (length > 0)]
    if not len(coded):
        return np.zeros(len(values), np.int8)
    ratio = np.median(coded) / np.where(length > 0, length, np.inf)
    often = np.clip(np.rint(np.log2(np.maximum(ratio, 1))), 0, _FINEST)
    often[np.abs(values).max(axis=(1, 2)) > largest] = 0
    found: Array = often.astype(np.int8)
    return found


def _scale_shape(at: Stretch, layers: int, tokens: int) -> tuple[int, ...]:
    return (layers, -(-tokens // GROUP), *at.plane.row)


def _frame(data: Any) -> Tensor:
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(data)
    return Tensor("U8", (len(frame),), frame)


def _read_steps(
    at: Stretch, stored: Mapping[str, Tensor], layers: int, tokens: int
) -> tuple[Array, Array, Array]:
    """Scales as float32, centres and `finer`."""
    shape = _scale_shape(at, layers, tokens)
    count, kind = math.prod(shape), scale_type(at.plane.dtype)
    size = count * ELEMENT_BYTES[kind]
    sides = np.empty(size + count + layers * tokens, np.uint8)
    read_frame(stored, ".steps", sides)
    scales = sides[:size].view(f"<u{ELEMENT_BYTES[kind]}").reshape(shape)
    check_scales(".steps", scales)
    finer = sides[size + count :].view(np.int8).reshape(layers, tokens)
    if finer.size and not 0 <= finer.min() <= finer.max() <= _FINEST:
        raise Damaged("tensor .steps has an impossible step")
    centre = sides[size : size + count].view(np.int8).reshape(shape)
    return scale_values(scales), centre, finer
