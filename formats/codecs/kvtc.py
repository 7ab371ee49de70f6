"""`kvtc`: calibrated transform coding, for sessions that are kept long; after KVTC (arXiv 2511.01815).

Of K the rotation by RoPE is undone. The rows of neighbouring layers are one vector a token, measured
in what errors cost (the calibration's metric) and turned onto its principal components, which one
step rounds (see `parts`). Tokens differ: the encoder tells from a token how much errors in it cost,
and scales it by its weight, a power of 2^(1/4), before rounding. Integers are entropy coded by how
large they may be: as calibrated for the component, times the token's own loudness, which takes 7 %
off the bytes. Rounding towards zero, or leaving out more components, costs more than a larger step.

Decoding depends on the tensors, the plane, the position and the calibration. Codes are exact
integers; the matrix product that makes rows of them is rounded as the machine's BLAS does it, so
decoded elements may differ in their last bit between machines. `max_error` has room for that.
Encoding may differ between machines too; on one, equal rows give equal bytes.

    .codes          U8: for each group of layers and 64 coded tokens two entropy codes, each after
                    its length as u32: what is told of tokens; integers, and means in them
    .exact, .kept   see `escape`: sinks, and tokens that cannot be coded within the bound
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.codecs import escape, parts
from kvsnap.formats.codecs.base import CalibratedCodec, Stretch
from kvsnap.formats.codecs.calibration import LayerGroup, PlaneCalibration, find
from kvsnap.formats.codecs.rope import rotate
from kvsnap.formats.codecs.stored import check_elements, check_names
from kvsnap.formats.codecs.uniform import narrow, widen
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import Array

_BOUND = 4.0
"""Declared error in steps, rotation included. Errors of all components together are near 0.3."""
_ALLOWED = 0.8
"""Of that, to the encoder: where products are rounded otherwise, a weight may be told 2^(1/4) less."""
_TRIES = 3
"""Without the tokens that did not fit the others' means are others, and others may not fit."""
_ROUNDING = {"F16": 2.0**-10, "BF16": 2.0**-7, "F32": 2.0**-16}
"""Relative: twice half a unit in the last place; for F32 what products of float32 lose."""
_SMALLEST = {"F16": 2.0**-24, "BF16": 2.0**-126, "F32": 2.0**-126}
_CODED = (".codes",)
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Kvtc(CalibratedCodec):
    """`calibration`: digest of a registered calibration. `step`: what is rounded to; KL grows with
    its square. On the bundled model in float32, whole files: 7.7x at KL 8e-4 (mean of next-token
    distributions) with 0.0037, 12.7x at 3.5e-3 with 0.008, 19.9x at 9.5e-3 with 0.014."""

    id = "kvtc"
    lossy = True

    step: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise Unsupported(f"codec kvtc has no step of {self.step}", "it is a number above 0")

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        plane = self._plane(at, rows)
        with _whatever():
            return self._stored(at, plane, rows)

    def _stored(self, at: Stretch, plane: PlaneCalibration, rows: Array) -> dict[str, Tensor]:
        kept = escape.kept_tokens(at, rows)
        for _ in range(_TRIES):
            coded = np.flatnonzero(~kept)
            fits, codes = self._encode(at, plane, rows, kept, coded)
            if fits.all() and len(coded):
                stored = escape.store(at, rows, kept)
                size = len(codes) + sum(memoryview(t.data).nbytes for t in stored.values())
                if size > rows.nbytes:
                    break
                return {**stored, ".codes": Tensor("U8", (len(codes),), codes)}
            kept[coded[~fits]] = True
        return escape.store(at, rows, np.ones_like(kept))

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        plane = self._plane(at, out)
        check_names(self.id, stored, _CODED, (*_CODED, *escape.NAMES), escape.NAMES)
        escape.restore(at, stored, out)
        if ".codes" not in stored:
            return
        coded = np.ones(out.shape[1], bool)
        if ".kept" in stored:
            coded[np.frombuffer(stored[".kept"].data, "<u4")] = False
        tokens = np.flatnonzero(coded)
        values = np.zeros(at.plane.file_shape(*out.shape[:2]), np.float32)
        codes = _Codes(stored[".codes"])
        with _whatever():
            for layers, group in _groups(plane):
                for some in _chunks(tokens):
                    part = parts.unpack_part(group, self.step, len(some), codes.take)
                    again = parts.vectors(group, self.step, part)
                    values[layers, some] = _as_rows(again, group, at)
            _rotate(at, values)
        if len(codes.left):
            raise Damaged("tensor .codes is longer than its tokens")
        narrowed = narrow(at.plane.dtype, values.reshape(out.shape))
        if len(tokens) == out.shape[1]:
            out[...] = narrowed
        else:
            out[:, tokens] = narrowed[:, tokens]

    def max_error(self, at: Stretch, rows: Array) -> Array:
        plane = self._plane(at, rows)
        with _whatever():
            return self._bound(at, plane, rows)

    def _bound(self, at: Stretch, plane: PlaneCalibration, rows: Array) -> Array:
        kept = escape.kept_tokens(at, rows)
        values = _values(at, rows, kept)
        limit = np.zeros(values.shape, np.float32)
        for layers, group in _groups(plane):
            for some in _chunks(np.flatnonzero(~kept)):
                components = _components(group, values[layers, some])
                exact = ~parts.possible(self.step, components)
                components[exact] = 0
                limit[layers, some] = self._limit(group, parts.told_weights(group, components), at)
                limit[:, some[exact]] = 0
        limit = limit.reshape(rows.shape)
        return _with_rounding(at, limit, widen(at.plane.dtype, escape.without(rows, kept)), 1.0)

    def _plane(self, at: Stretch, rows: Array) -> PlaneCalibration:
        check_elements(self.id, at)
        calibration = find(self.calibration)
        if self.step < calibration.finest:
            raise Unsupported(
                f"codec kvtc: the calibration is good for steps from {calibration.finest},"
                f" not for {self.step}",
                "take a larger step",
            )
        plane = calibration.planes.get(at.name)
        if plane is None or plane.row != at.plane.row or plane.layers != len(rows):
            raise Unsupported(
                f"codec kvtc: the calibration has no plane {at.name} of {len(rows)} layers of"
                f" {at.plane.row}",
                "calibrate for this model and engine",
            )
        return plane

    def _encode(
        self, at: Stretch, plane: PlaneCalibration, rows: Array, kept: Array, coded: Array
    ) -> tuple[Array, bytes]:
        """Which of the tokens can be coded within the bound, and the codes of all."""
        values = _values(at, rows, kept)
        again, limit = np.zeros_like(values), np.zeros_like(values)
        fits = np.ones(rows.shape[1], bool)
        codes: list[bytes] = []
        for layers, group in _groups(plane):
            for some in _chunks(coded):
                components = _components(group, values[layers, some])
                possible = parts.possible(self.step, components)
                if not possible.all():
                    fits[some] = possible
                    return fits[coded], b""
                weights = parts.told_weights(group, components)
                part = parts.make_part(group, self.step, components, weights)
                for code in parts.pack_part(group, self.step, part):
                    codes += [_LENGTH.pack(len(code)), code]
                again[layers, some] = _as_rows(parts.vectors(group, self.step, part), group, at)
                limit[layers, some] = self._limit(group, weights, at)
        _rotate(at, again)
        narrowed = narrow(at.plane.dtype, again.reshape(rows.shape))
        beyond = escape.kept_tokens(Stretch(at.name, at.plane, escape.SINKS), narrowed)
        true = widen(at.plane.dtype, escape.without(rows, kept))
        off = np.abs(widen(at.plane.dtype, escape.without(narrowed, beyond)) - true)
        limit = _with_rounding(at, _ALLOWED * limit.reshape(rows.shape), true, 0.5)
        fits &= (off <= limit).all(axis=(0, 2)) & ~beyond
        return fits[coded], b"".join(codes)

    def _limit(self, group: LayerGroup, weights: Array, at: Stretch) -> Array:
        """Declared error [layers, tokens, heads, 1] before rounding to elements."""
        heads = at.plane.row[0]
        steps = np.float32(_BOUND) * parts.deviations(self.step, weights)
        reach = group.reach.reshape(group.layers, 1, heads, 1)
        limit: Array = reach * steps[:, None, None]
        return limit


def _whatever() -> np.errstate:
    """A calibration from elsewhere, or codes that nobody encoded, may give infinities and NaN. The
    encoder keeps such tokens exactly; a decoder's rows are those of the file. No word on stderr."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")


def _groups(plane: PlaneCalibration) -> Iterator[tuple[slice, LayerGroup]]:
    first = 0
    for group in plane.groups:
        yield slice(first, first + group.layers), group
        first += group.layers


def _chunks(tokens: Array) -> Iterator[Array]:
    for first in range(0, len(tokens), parts.TOKENS):
        yield tokens[first : first + parts.TOKENS]


class _Codes:
    """The codes of a block, one after the other."""

    def __init__(self, tensor: Tensor) -> None:
        self.left = memoryview(tensor.data).cast("B")
        if tensor.dtype != "U8" or tensor.shape != (len(self.left),):
            raise Damaged(f"tensor .codes is {tensor.dtype} {tensor.shape}, not bytes")

    def take(self) -> memoryview:
        if len(self.left) < _LENGTH.size:
            raise Damaged("tensor .codes is cut")
        end = _LENGTH.size + _LENGTH.unpack_from(self.left)[0]
        if end > len(self.left):
            raise Damaged("tensor .codes is cut")
        code, self.left = self.left[_LENGTH.size : end], self.left[end:]
        return code


def _values(at: Stretch, rows: Array, kept: Array) -> Array:
    """float32 [layers, tokens, heads, dim], RoPE undone, pairs as halves; kept tokens are zero."""
    whole = widen(at.plane.dtype, escape.without(rows, kept))
    values = np.array(whole).reshape(at.plane.file_shape(*rows.shape[:2]))
    if at.plane.rope is not None:
        rotate(at.plane.rope, values, at.start, back=True)
    return values[..., _order(at)] if _order(at) is not None else values


def _order(at: Stretch) -> Array | None:
    """Which element of a head comes where in the calibration's order; None: all in their own."""
    rope = at.plane.rope
    if rope is None or rope.pairing == "halves":
        return None
    order = np.arange(at.plane.row[1])
    order[: rope.dims] = np.concatenate([np.arange(0, rope.dims, 2), np.arange(1, rope.dims, 2)])
    return order


def _components(group: LayerGroup, values: Array) -> Array:
    """Unweighted components [tokens, kept] of values [layers, tokens, heads, dim]."""
    vectors = values.transpose(1, 0, 2, 3).reshape(values.shape[1], -1) - group.mean
    with np.errstate(over="ignore", invalid="ignore"):  # the largest of F32; they are kept exactly
        found: Array = vectors @ group.encoder
    return found


def _as_rows(vectors: Array, group: LayerGroup, at: Stretch) -> Array:
    """[layers, tokens, heads, dim] in the plane's order, RoPE still undone."""
    shape = (len(vectors), group.layers, *at.plane.row)
    values = vectors.reshape(shape).transpose(1, 0, 2, 3)
    order = _order(at)
    return values if order is None else values[..., np.argsort(order)]


def _rotate(at: Stretch, values: Array) -> None:
    if at.plane.rope is not None:
        rotate(at.plane.rope, values, at.start)


def _with_rounding(at: Stretch, limit: Array, true: Array, share: float) -> Array:
    """The limit and what rounding to elements adds. The encoder uses half of that, so that another
    machine's products stay within the declared whole."""
    dtype = at.plane.dtype
    rounding = (np.abs(true) + limit) * np.float32(_ROUNDING[dtype]) + np.float32(_SMALLEST[dtype])
    found: Array = limit + np.float32(share) * rounding * (limit > 0)  # kept tokens have none
    return found
