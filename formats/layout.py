"""The shape of KV: which groups of layers there are, and how one token's rows look in each.

A *plane* is one kind of row (`k`, `v`, `latent`). A *group* is a run of layers whose planes have
equal shapes; it becomes one tensor a plane in a file, named `GROUP.PLANE`. Three kinds of planes:

    elements   [layers, tokens, kv_heads, head_dim] in the engine's element type, token-major
    rows       [layers, tokens, row_bytes] U8: ggml's quantized types, cut between tokens only
    pages      [layers, page_bytes] U8: a whole block as an engine keeps it, nothing to cut inside

Most groups have rows of every token; these stand in block files. Of a sliding-window layer an engine
keeps the last tokens' rows only, of a recurrent one a state of the position: such groups have a
*span*, and stand in state checkpoints.

In memory a plane is a numpy array of unsigned integers, [layers, tokens, row] (pages: [layers,
page_bytes]): numpy has no bfloat16, and nothing here computes with the values.
"""

from __future__ import annotations

import functools
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvsnap.formats.errors import Damaged, Unsupported

Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = Mapping[str, Array]
"""`GROUP.PLANE` → array [layers, tokens, row]; all planes hold the same tokens, but for those of
groups with a span."""
Ranges: TypeAlias = Mapping[str, range]
"""`GROUP.PLANE` → the positions whose rows are there."""

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}
KINDS = ("elements", "rows", "pages")
_MAX_SIZE = 2**31 - 1
"""Of layers, heads, elements or bytes: what an identity in a file may claim of one of them."""
_MAX_NAME = 64
"""Characters of a group's or a plane's."""


@dataclass(frozen=True, kw_only=True)
class PlaneRope:
    """How positions are rotated into the rows of a K plane, for codecs that undo it.

    Of each head the first `dims` elements are rotated, pair j by the angle
    position * scale * base^(-2j / dims). `pairing` says which elements are a pair: "interleaved"
    (2j, 2j + 1), as in GGUF files of the llama family, or "halves" (j, j + dims / 2), as in
    transformers. Wrong facts cost bytes, never values: what is undone is done again.
    """

    pairing: str
    dims: int
    base: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.pairing not in ("interleaved", "halves"):
            raise Unsupported(f"pairing {reprlib.repr(self.pairing)} of RoPE is not known")
        if self.dims < 2 or self.dims % 2 or not (self.base > 0 and math.isfinite(self.base)):
            raise Damaged("impossible RoPE facts in the layout")
        if not math.isfinite(self.scale):
            raise Damaged("impossible RoPE facts in the layout")


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One kind of row. `row` is (kv_heads, head_dim) for elements, (bytes,) for rows and pages."""

    name: str
    kind: str
    dtype: str
    row: tuple[int, ...]
    source_type: str = ""
    """The engine's own name of the type (`f16`, `q8_0`); it stands in the identity's kv_types."""
    rope: PlaneRope | None = None
    """None: not rotated, or nobody knows how. Codecs then take the rows as they are."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise Unsupported(
                f"rows of kind {reprlib.repr(self.kind)} are not known to this version of kvsnap"
            )
        if self.dtype not in ELEMENT_BYTES or (self.kind != "elements" and self.dtype != "U8"):
            raise Unsupported(f"{self.kind} of type {reprlib.repr(self.dtype)} are not known")
        sizes = 2 if self.kind == "elements" else 1
        if len(self.row) != sizes or not all(1 <= n <= _MAX_SIZE for n in self.row):
            raise Damaged(f"plane {reprlib.repr(self.name)} has an impossible row shape")
        if self.rope is not None and (self.kind != "elements" or self.rope.dims > self.row[1]):
            raise Damaged(f"plane {reprlib.repr(self.name)} has no such RoPE")
        _check_name(self.name)

    @property
    def can_cut(self) -> bool:
        """Whether the rows of one token can be taken out of a block."""
        return self.kind != "pages"

    @property
    def itemsize(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def memory_dtype(self) -> np.dtype[Any]:
        """The unsigned integer type of the in-memory array."""
        return np.dtype(f"<u{self.itemsize}")

    def memory_shape(self, layers: int, tokens: int) -> tuple[int, ...]:
        width = math.prod(self.row)
        return (layers, tokens, width) if self.can_cut else (layers, width)

    def file_shape(self, layers: int, tokens: int) -> tuple[int, ...]:
        return (layers, tokens, *self.row) if self.can_cut else (layers, *self.row)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A run of `layers` layers whose planes have equal shapes."""

    name: str
    layers: int
    planes: tuple[Plane, ...]
    span: int | None = None
    """How many tokens back from a position its rows reach. None: all of them, as in attention over
    the whole prefix. A sliding window of n tokens needs the last n - 1. 0: none, but one state of
    the position (recurrent layers); its planes are pages."""

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.span is not None and not 0 <= self.span <= _MAX_SIZE:
            raise Damaged(f"group {reprlib.repr(self.name)} has an impossible span")
        if self.span is not None and any(p.can_cut != (self.span > 0) for p in self.planes):
            raise Damaged(f"group {reprlib.repr(self.name)} has planes that do not fit its span")
        if not 1 <= self.layers <= _MAX_SIZE:
            raise Damaged(f"group {reprlib.repr(self.name)} has an impossible number of layers")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All groups of one engine and model, in layer order."""

    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if len(self.planes()) != sum(len(group.planes) for group in self.groups):
            raise Damaged("two planes of the layout have one name")

    @functools.cached_property
    def _planes(self) -> dict[str, tuple[int, Plane]]:
        found = {f"{g.name}.{p.name}": (g.layers, p) for g in self.groups for p in g.planes}
        return dict(sorted(found.items()))

    def planes(self) -> dict[str, tuple[int, Plane]]:
        """`GROUP.PLANE` → (layers, plane), sorted by name: the order in files and digests."""
        return self._planes

    @property
    def can_cut(self) -> bool:
        """Whether the rows of any token that are there can be taken alone."""
        return all(plane.can_cut for group in self.groups for plane in group.planes)

    @functools.cached_property
    def in_blocks(self) -> Layout:
        """The groups that have rows of every token: what a block file holds."""
        groups = tuple(group for group in self.groups if group.span is None)
        return self if groups == self.groups else Layout(groups=groups)

    def of_blocks(self, rows: Rows) -> dict[str, Array]:
        """Those among rows of all groups that stand in block files."""
        return {name: rows[name] for name in self.in_blocks.planes()}

    @property
    def needs_state(self) -> bool:
        """Whether blocks are not enough to go on from: a state checkpoint is needed as well."""
        return self.in_blocks is not self

    def ranges_at(self, start: int, position: int) -> dict[str, range]:
        """What a state checkpoint at `position` holds, after a last block that ends at `start`."""
        found = {}
        for group in self.groups:
            first = start if group.span is None else max(0, position - group.span)
            for plane in group.planes:
                found[f"{group.name}.{plane.name}"] = range(first, position)
        return dict(sorted(found.items()))

    def token_bytes(self) -> int:
        """Bytes of one token's rows over all layers; 0 where pages cannot be divided."""
        return sum(
            layers * math.prod(plane.row) * plane.itemsize
            for layers, plane in self.planes().values()
            if plane.can_cut
        )

    def size(self, tokens: int | Ranges) -> int:
        """Bytes of the arrays that `empty` makes."""
        return sum(
            math.prod(plane.memory_shape(layers, _count(tokens, name))) * plane.itemsize
            for name, (layers, plane) in self.planes().items()
        )

    def empty(self, tokens: int | Ranges) -> dict[str, Array]:
        """Uninitialised arrays for so many tokens of each plane, or for the given positions."""
        try:
            return {
                name: np.empty(plane.memory_shape(layers, _count(tokens, name)), plane.memory_dtype)
                for name, (layers, plane) in self.planes().items()
            }
        except (MemoryError, ValueError) as error:  # ValueError: more bytes than can be addressed
            raise Damaged("no memory for so many tokens of the layout") from error

    def check(self, rows: Rows, tokens: int | Ranges) -> None:
        """Raise `Damaged` unless `rows` are exactly this layout's planes for those tokens."""
        planes = self.planes()
        if rows.keys() != planes.keys():
            raise Damaged(f"planes {sorted(rows)} where the layout has {list(planes)}")
        for name, (layers, plane) in planes.items():
            shape = plane.memory_shape(layers, _count(tokens, name))
            dtype = plane.memory_dtype
            if rows[name].shape != shape or rows[name].dtype != dtype:
                raise Damaged(
                    f"plane {name} is {rows[name].dtype} {rows[name].shape}, not {dtype} {shape}"
                )


def layout_to_json(layout: Layout) -> list[dict[str, Any]]:
    """The layout as it stands in an identity."""
    return [
        {
            "group": g.name,
            "layers": g.layers,
            "span": g.span,
            "planes": [
                {
                    "plane": p.name,
                    "kind": p.kind,
                    "dtype": p.dtype,
                    "rope": vars(p.rope) if p.rope else None,
                    "row": list(p.row),
                }
                for p in g.planes
            ],
        }
        for g in layout.groups
    ]


def layout_from_json(value: Any) -> Layout:
    """Inverse of `layout_to_json`, source types aside; raises `Damaged` for anything else."""
    try:
        return Layout(
            groups=tuple(
                Group(
                    name=_typed(g["group"], str),
                    layers=_typed(g["layers"], int),
                    span=None if g["span"] is None else _typed(g["span"], int),
                    planes=tuple(
                        Plane(
                            name=_typed(p["plane"], str),
                            kind=_typed(p["kind"], str),
                            dtype=_typed(p["dtype"], str),
                            row=tuple(_typed(n, int) for n in _typed(p["row"], list)),
                            rope=_rope(p["rope"]),
                        )
                        for p in g["planes"]
                    ),
                )
                for g in value
            )
        )
    except (KeyError, TypeError) as error:
        raise Damaged("the layout in the identity cannot be read") from error


def _count(tokens: int | Ranges, name: str) -> int:
    return tokens if isinstance(tokens, int) else len(tokens[name])


def _rope(value: Any) -> PlaneRope | None:
    if value is None:
        return None
    return PlaneRope(
        pairing=_typed(value["pairing"], str),
        dims=_typed(value["dims"], int),
        base=_typed(value["base"], float),
        scale=_typed(value["scale"], float),
    )


_T = TypeVar("_T", str, int, float, list)


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:  # not isinstance: True is an int
        raise TypeError
    return value


def _check_name(name: str) -> None:
    # `GROUP.PLANE` must say which is which; and it is shown where something is wrong with its rows.
    if not 1 <= len(name) <= _MAX_NAME or "." in name or not name.isprintable():
        raise Damaged(f"{reprlib.repr(name)} cannot name a group or a plane")
