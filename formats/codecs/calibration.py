"""Calibrations of codec `kvtc`: what was learnt of one model's keys and values, as a file.

A calibration is a safetensors file that is named by its digest and registered in the process that
uses it: a codec's parameter is the digest, so that equal text means equal decoding. For every plane
(`GROUP.PLANE`) the layers are cut into groups. A group's rows, RoPE undone and heads in the order
of PlaneRope's "halves", are one vector x of layers * heads * dim values a token:

    y = f * (x - mean) @ encoder          f: the token's weight, from `weigher`
    x = y @ basis / f + mean              encoder = metric @ basis.T

    GROUP.PLANE.N.basis     F16 [kept, width]      components, the most spread first, each channel
                                                   divided by its `scale`
    GROUP.PLANE.N.scale     F32 [width]
    GROUP.PLANE.N.mean      F32 [width]
    GROUP.PLANE.N.metric    F32 [layers * heads, dim, dim]  what an error costs, a block a head
    GROUP.PLANE.N.spread    F32 [kept]             mean |y| of each component, falling
    GROUP.PLANE.N.weigher   F32 [FEATURES]         times features: log2 of the weight

The basis must be precise: what `encoder` and `basis` fail to be inverse by is an error that all tokens
share. A byte a value for the small components, off by 1 % of them, doubled the loss of a fine step.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap.formats.container import Packed, Tensor, check_file_digest, pack, parse
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.fields import FORMAT_VERSION, check_version
from kvsnap.formats.layout import Array

KIND = "calibration"
FIRST = 64
"""Components that a token's weight is told from."""
FEATURES = FIRST + 3
"""They, the logarithms of the energy in them and in the rest, and a constant."""
_FAR = 8.0
"""Mean magnitudes; components beyond count as this far out."""
_KINDS = {
    "basis": "F16",
    "mean": "F32",
    "metric": "F32",
    "scale": "F32",
    "spread": "F32",
    "weigher": "F32",
}
_DTYPES = {"F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Neighbouring layers that are coded together. Arrays are float32, `basis` in true units."""

    layers: int
    basis: Array
    mean: Array
    metric: Array
    spread: Array
    weigher: Array

    @functools.cached_property
    def encoder(self) -> Array:
        """[width, kept]; computed when first used, since readers need none."""
        blocks, dim, _ = self.metric.shape
        own = self.basis.reshape(-1, blocks, dim).transpose(1, 2, 0)
        return np.ascontiguousarray(np.matmul(self.metric, own).reshape(blocks * dim, -1))

    def features(self, y: Array) -> Array:
        """[tokens, FEATURES] of unweighted components [tokens, kept]: what `weigher` multiplies."""
        ratio = np.clip(y / self.spread, -1e9, 1e9)  # so that no square overflows
        found = np.zeros((len(y), FEATURES), np.float32)
        first = ratio[:, :FIRST]
        found[:, : first.shape[1]] = np.clip(first, -_FAR, _FAR)
        for column, part in ((FIRST, first), (FIRST + 1, ratio[:, FIRST:])):
            energy = np.square(part).sum(axis=1) / max(1, part.shape[1])
            found[:, column] = np.log(np.clip(energy, 1e-6, 1e12))
        found[:, -1] = 1
        return found

    @functools.cached_property
    def reach(self) -> Array:
        """[layers * heads]: the largest deviation that a unit deviation of every component makes in
        a channel of the head."""
        inverse = np.linalg.inv(self.metric.astype(np.float64))
        found: Array = np.sqrt(np.diagonal(inverse, axis1=1, axis2=2).max(axis=1))
        return found.astype(np.float32)


@dataclass(frozen=True, eq=False)
class PlaneCalibration:
    """`row` is (heads, dim); the groups' layers add up to the plane's."""

    row: tuple[int, int]
    groups: tuple[LayerGroup, ...]

    @property
    def layers(self) -> int:
        return sum(group.layers for group in self.groups)


@dataclass(frozen=True, eq=False)
class Calibration:
    """`finest` is the smallest step that the kept components are enough for."""

    model: str
    finest: float
    planes: Mapping[str, PlaneCalibration]
    digest: str = ""
    """Of the file; empty before there is one."""


def pack_calibration(calibration: Calibration) -> Packed:
    """The file, whose `file_digest` names it. Equal arrays give equal bytes."""
    tensors = []
    for name, plane in sorted(calibration.planes.items()):
        for number, group in enumerate(plane.groups):
            tensors += [(f"{name}.{number}.{key}", t) for key, t in _group_tensors(group)]
    shapes = {
        name: {"layers": [group.layers for group in plane.groups], "row": list(plane.row)}
        for name, plane in calibration.planes.items()
    }
    metadata = {
        "finest": repr(float(calibration.finest)),
        "kind": KIND,
        "kvsnap": FORMAT_VERSION,
        "model": calibration.model,
        "planes": json.dumps(shapes, sort_keys=True, separators=(",", ":")),
    }
    return pack(metadata, tensors)


def parse_calibration(buffer: memoryview) -> Calibration:
    """Read a whole file. Raises `Damaged`, or `Unsupported` for another version."""
    digest = check_file_digest(buffer)
    container = parse(buffer)
    check_version(container, KIND)
    left = dict(container.tensors)
    planes = {}
    for name, (layers, row) in _shapes(container.field("planes")).items():
        groups = [
            _read_group(f"{name}.{number}.", count, row, left)
            for number, count in enumerate(layers)
        ]
        planes[name] = PlaneCalibration(row, tuple(groups))
    if left:
        raise Damaged(f"tensors that the calibration does not have: {reprlib.repr(sorted(left))}")
    try:
        finest = float(container.field("finest"))
    except ValueError:
        finest = math.nan
    if not 0 < finest < math.inf:
        raise Damaged("the calibration's finest step is not a number above zero")
    return Calibration(container.field("model"), finest, planes, digest)


_REGISTERED: dict[str, Calibration] = {}


def register(calibration: Calibration) -> str:
    """Make a parsed calibration known to codecs under its digest, which is returned."""
    if not calibration.digest:
        raise ValueError("a calibration is registered as parsed from its file")
    return _REGISTERED.setdefault(calibration.digest, calibration).digest


def find(digest: str) -> Calibration:
    """The registered calibration of that digest; `Unsupported` where there is none."""
    try:
        return _REGISTERED[digest]
    except KeyError:
        what = f"calibration {reprlib.repr(digest)} is not here" if digest else "no calibration"
        raise Unsupported(
            f"codec kvtc: {what}", "give the file that kvsnap calibrate wrote for this model"
        ) from None


def _group_tensors(group: LayerGroup) -> list[tuple[str, Tensor]]:
    highest = np.abs(group.basis).max(axis=0)
    scale = np.where(highest > 0, highest, 1).astype(np.float32)
    arrays = {**vars(group), "basis": group.basis / scale, "scale": scale}
    return [
        (key, Tensor(kind, arrays[key].shape, arrays[key].astype(_DTYPES[kind], order="C")))
        for key, kind in _KINDS.items()
    ]


def _read_group(
    prefix: str, layers: int, row: tuple[int, int], left: dict[str, Tensor]
) -> LayerGroup:
    heads, dim = row
    width, brief = layers * heads * dim, reprlib.repr(prefix[:-1])  # a name may be anything
    found = {key: left.pop(prefix + key, None) for key in _KINDS}
    first = found["basis"]
    kept = first.shape[0] if first is not None and first.shape else 0
    shapes: dict[str, tuple[int, ...]] = {
        "basis": (kept, width),
        "mean": (width,),
        "metric": (layers * heads, dim, dim),
        "scale": (width,),
        "spread": (kept,),
        "weigher": (FEATURES,),
    }
    arrays: dict[str, Array] = {}
    for key, kind in _KINDS.items():
        tensor = found[key]
        if tensor is None or tensor.dtype != kind or tensor.shape != shapes[key]:
            raise Damaged(f"tensor {key} of {brief} is missing or not {kind} {shapes[key]}")
        array = np.frombuffer(tensor.data, _DTYPES[kind]).astype(np.float32)
        if not np.isfinite(array).all():
            raise Damaged(f"tensor {key} of {brief} holds values that are no numbers")
        arrays[key] = array.reshape(tensor.shape)
    spread, metric = arrays["spread"], arrays["metric"]
    if not 0 < kept <= width or (spread <= 0).any() or (np.diff(spread) > 0).any():
        raise Damaged(f"tensor spread of {brief} is not a falling list of spreads")
    with np.errstate(over="ignore"):
        basis = arrays["basis"] * arrays["scale"]
    if not np.isfinite(basis).all() or not _positive(metric):
        raise Damaged(f"the basis or the metric of {brief} cannot be used")
    return LayerGroup(layers, basis, arrays["mean"], metric, spread, arrays["weigher"])


def _positive(metric: Array) -> bool:
    """Positive definite, and such that `LayerGroup.reach` is a number: `cholesky` looks at one half of
    each block only, and one whose other half differs may have no inverse."""
    whole = metric.astype(np.float64)
    try:
        np.linalg.cholesky(whole)
        reach = np.diagonal(np.linalg.inv(whole), axis1=1, axis2=2)
    except np.linalg.LinAlgError:
        return False
    return bool((np.isfinite(reach) & (reach > 0)).all())


def _shapes(text: str) -> dict[str, tuple[list[int], tuple[int, int]]]:
    """Plane → (layers of its groups, row)."""
    try:
        value: Any = json.loads(text)
        planes = {}
        for name, plane in value.items():
            (heads, dim), layers = plane["row"], plane["layers"]
            numbers = [heads, dim, *layers]
            if not layers or any(type(n) is not int or not 1 <= n < 2**20 for n in numbers):
                raise ValueError
            planes[name] = (layers, (heads, dim))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged("the planes of the calibration cannot be read") from error
    return planes
