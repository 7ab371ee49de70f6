"""`q8`: eight bits a value; for sessions that must read as if they had been kept exactly.

A value is a code of -127..127 times a scale, `uniform` says how. K has a scale for each channel and
group of 64 tokens, since a few of its channels are ten times as large as the rest; V has one for
each token and head. The scale is the smallest storable one that needs no code beyond 127, so none
is clamped. On the bundled model, blocks of 64 tokens: 1.95x, KL 7e-5 (mean, of next-token
distributions), 99.5 % equal first choices. zstd level 1 on the codes too gives 4 % more, all of it
from V, at two thirds of the speed: codes stay plain, and a device can take them as they are.

    .codes   U8 (int8 bits) [layers, tokens, heads, dim]   zero where the token is kept exactly
    .scale   U8 or BF16     [layers, groups, heads, dim], or [layers, tokens, heads]
    .exact, .kept           see `escape`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsnap.formats.codecs import escape
from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.codecs.stored import check_elements, check_names, read
from kvsnap.formats.codecs.uniform import (
    GROUP,
    check_scales,
    chunks,
    magnitudes,
    scale_type,
    scale_values,
    scales_above,
    widen,
    write_products,
)
from kvsnap.formats.container import Tensor
from kvsnap.formats.layout import ELEMENT_BYTES, Array

if TYPE_CHECKING:
    import torch

_CODED = (".codes", ".scale")
_FEW = 8
"""Fewer tokens than this have too little to share a channel's scale."""


@dataclass(frozen=True)
class Q8(Codec):
    id = "q8"
    lossy = True

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        check_elements(self.id, at)
        kept, layers, tokens = _kept(at, rows), *rows.shape[:2]
        stored = escape.store(at, rows, kept)
        if kept.all():
            return stored
        coded = escape.without(rows, kept)
        scale = _scales(at, coded)
        steps = scale_values(scale)
        codes = np.empty(at.plane.file_shape(layers, tokens), np.int8)
        for layer, some, group in chunks(*rows.shape):
            values = widen(at.plane.dtype, coded[layer, some]).reshape(codes[layer, some].shape)
            step = _own(at, tokens, steps, layer, some, group)
            values = values / np.where(step == 0, np.float32(1), step)
            np.rint(values, out=values)
            np.copyto(codes[layer, some], values, casting="unsafe")
        stored[".codes"] = Tensor("U8", codes.shape, codes.view(np.uint8))
        stored[".scale"] = Tensor(scale_type(at.plane.dtype), scale.shape, scale)
        return stored

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        check_elements(self.id, at)
        check_names(self.id, stored, _CODED, (*_CODED, *escape.NAMES), escape.NAMES)
        if ".codes" in stored:
            layers, tokens, _ = out.shape
            codes, scale = _read(at, stored, layers, tokens)
            for layer, some, group in chunks(*out.shape):
                step = _own(at, tokens, scale, layer, some, group)
                write_products(at.plane.dtype, codes[layer, some], step, out[layer, some])
        escape.restore(at, stored, out)

    def decode_on(
        self, device: str, at: Stretch, stored: Mapping[str, Tensor], layers: int, tokens: int
    ) -> torch.Tensor:
        """Half of the bytes go over, and become rows there."""
        if ".codes" not in stored:
            return super().decode_on(device, at, stored, layers, tokens)
        from kvsnap.formats.codecs import on_device

        check_elements(self.id, at)
        check_names(self.id, stored, _CODED, (*_CODED, *escape.NAMES), escape.NAMES)
        codes, scale = _read(at, stored, layers, tokens)
        steps = on_device.carried(scale, device)
        steps = on_device.of_tokens(steps, tokens) if _by_channel(at, tokens) else steps[..., None]
        rows = on_device.products(on_device.carried(codes, device), steps, at.plane.dtype)
        kept, exact = escape.kept_rows(at, stored, (layers, tokens))
        return on_device.replaced(rows, kept, at.plane, exact)

    def max_error(self, at: Stretch, rows: Array) -> Array:
        """Half a step. For BF16 a step: the product is rounded to the nearest element, which is
        no farther from it than the row's own value. Kept tokens have none."""
        kept, layers, tokens = _kept(at, rows), *rows.shape[:2]
        scale = scale_values(_scales(at, escape.without(rows, kept)))
        # The quotient in `encode` is rounded too: 127 * 2^-24 of a step.
        scale *= np.float32((1.0 if at.plane.dtype == "BF16" else 0.5) + 2.0**-16)
        bound = np.empty(at.plane.file_shape(layers, tokens), np.float32)
        for layer, some, group in chunks(*rows.shape):
            bound[layer, some] = _own(at, tokens, scale, layer, some, group)
        bound[:, kept] = 0
        return bound.reshape(rows.shape)


def _read(
    at: Stretch, stored: Mapping[str, Tensor], layers: int, tokens: int
) -> tuple[Array, Array]:
    """Codes, int8 [layers, tokens, heads, dim], and scales as float32."""
    codes = read(stored, ".codes", "U8", at.plane.file_shape(layers, tokens)).view(np.int8)
    bits = read(stored, ".scale", scale_type(at.plane.dtype), _scale_shape(at, layers, tokens))
    check_scales(".scale", bits)
    return codes, scale_values(bits)


def _kept(at: Stretch, rows: Array) -> Array:
    """Tokens to keep exactly: all, where codes and scales would take more than the rows."""
    kept = escape.kept_tokens(at, rows)
    layers, tokens, width = rows.shape
    scales = math.prod(_scale_shape(at, layers, tokens)) * ELEMENT_BYTES[scale_type(at.plane.dtype)]
    exact = int(kept.sum()) * layers * width * rows.itemsize
    if rows.size + scales + exact > rows.nbytes:
        kept[:] = True
    return kept


def _by_channel(at: Stretch, tokens: int) -> bool:
    return at.plane.name != "v" and tokens >= _FEW


def _scale_shape(at: Stretch, layers: int, tokens: int) -> tuple[int, ...]:
    heads, dim = at.plane.row
    if _by_channel(at, tokens):
        return (layers, -(-tokens // GROUP), heads, dim)
    return (layers, tokens, heads)


def _own(at: Stretch, tokens: int, scale: Array, layer: slice, some: slice, group: int) -> Array:
    """The scales of some tokens of one group, with all four axes of their codes."""
    own: Array = (
        scale[layer, group, None] if _by_channel(at, tokens) else scale[layer, some, :, None]
    )
    return own


def _scales(at: Stretch, coded: Array) -> Array:
    """Scales as stored: the smallest ones that need no code beyond 127."""
    layers, tokens, _ = coded.shape
    highest = np.empty(_scale_shape(at, layers, tokens), coded.dtype)
    for layer in range(layers):
        sizes = magnitudes(coded[layer]).reshape(tokens, *at.plane.row)
        if _by_channel(at, tokens):
            for group, own in enumerate(highest[layer]):
                sizes[group * GROUP : (group + 1) * GROUP].max(axis=0, out=own)
        else:
            sizes.max(axis=2, out=highest[layer])
    return scales_above(at.plane.dtype, widen(at.plane.dtype, highest))
