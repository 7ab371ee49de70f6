"""Whether rows from elsewhere are those that an engine computes itself, within its own rounding.

No two runs of an engine round alike: other batches, another build, another machine. How far they part
is measured where it matters: the same tokens in one batch, one by one, and on top of rows that are moved
by a thousandth. That last one is for weights of few bits: there llama.cpp quantizes activations, too, and
the least change decides otherwise which way they are rounded. On the bundled model (Q4_1 weights) a token's
rows differ by up to 0.09 of their length that way, as much as those of a llama-server of another build or
of transformers; rows that are one position off, or in another order, differ by 0.7 and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvsnap.engines.base import Engine
from kvsnap.formats.interchange.ggml_values import unrotated, values
from kvsnap.formats.layout import Array, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.fidelity import mark_lossy
from kvsnap.kvstore.measure.live import MEASURED

ALONE = 16
"""Tokens that are evaluated one by one to measure rounding, a large model takes a second for them; and
whose rows are moved."""
_MOVED = 2.0**-10
_FACTOR = 4.0
"""Rounding of another build may be so much larger than what is measured here."""
_LARGEST = 0.35
"""Half of what the least wrong rows differ by, whatever was measured."""
_STEP = {"f32": 2.0**-13, "f16": 2.0**-10, "bf16": 2.0**-7, "q8_0": 2.0**-6}
_COARSE = 2.0**-3
"""What storing a row rounds it by, of its length; of the types of four and five bits."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of a token's rows, of the typical length of such rows in that layer."""

    size: float
    plane: str
    layer: int
    token: int

    def __str__(self) -> str:
        return f"{self.size:.2g} in layer {self.layer} of {self.plane}, token {self.token}"


class Rounding:
    """Of one engine; `bound` is up to what rows count as the same."""

    def __init__(self, engine: Engine, types: Mapping[str, str], rotation: tuple[int, int]) -> None:
        """`types`: element types by plane; `rotation`: of K and of V, the runs that are rotated."""
        self._engine, self._types, self._rotation = engine, types, rotation
        self.measured = 0.0

    @property
    def step(self) -> float:
        """What storing the rows may round them by, a few times over."""
        return 4 * max(_STEP.get(kind, _COARSE) for kind in self._types.values())

    @property
    def bound(self) -> float:
        return min(_LARGEST, _FACTOR * self.measured + self.step)

    def computed(self, ids: TokenIds, start: int) -> Rows:
        """What the engine computes at positions `start`.. of `ids`, on top of the `start` tokens that
        it holds, in one batch; and what is needed to measure with. The engine holds no more afterwards."""
        engine, stop = self._engine, min(start + ALONE, len(ids))
        for number in range(start, stop):
            engine.evaluate(ids[number : number + 1])
        alone = engine.export(start, stop)
        engine.truncate(start)
        engine.evaluate(ids[start:])
        rows = engine.export(start, len(ids))
        front, rest = _divided(rows, stop - start)
        self._measure(alone, front, start)
        if stop < len(ids):
            marks = engine.marks
            self._put_moved(front, ids[:stop], start)
            engine.evaluate(ids[stop:])
            self._measure(engine.export(stop, len(ids)), rest, stop)
            engine.truncate(start)
            engine.marks = marks  # they are gone; of four bits they were moved by nothing
        engine.truncate(start)
        return rows

    def _measure(self, found: Rows, wanted: Rows, start: int) -> None:
        self.measured = max(self.measured, self.difference(found, wanted, start).size)

    def _put_moved(self, rows: Rows, ids: TokenIds, start: int) -> None:
        self._engine.truncate(start)
        landing = self._engine.landing(len(ids), start)
        for name, array in landing.rows.items():
            array[...] = _moved(rows[name], self._types[name])
        mark_lossy(self._engine, MEASURED, landing, ids)
        self._engine.load(landing, ids)

    def difference(self, found: Rows, wanted: Rows, start: int) -> Difference:
        """The largest one. Not a number anywhere: infinite."""
        largest = Difference(0.0, "", 0, start)
        for name in wanted:
            one, other = self.values(name, found[name]), self.values(name, wanted[name])
            with np.errstate(over="ignore", invalid="ignore"):
                lengths = np.median(np.linalg.norm(other, axis=2), axis=1)
                parted = np.linalg.norm(one - other, axis=2) / np.maximum(lengths, 1e-20)[:, None]
            parted = np.where(np.isfinite(parted), parted, np.inf)
            layer, token = np.unravel_index(int(parted.argmax()), parted.shape)
            if parted[layer, token] > largest.size:
                largest = Difference(
                    float(parted[layer, token]), name, int(layer), start + int(token)
                )
        return largest

    def values(self, name: str, rows: Array) -> Array:
        """float32, as the engine attends to them: not rotated."""
        found = values(rows, self._types[name])
        return unrotated(found, self._rotation[name.endswith(".v")])


def _divided(rows: Rows, tokens: int) -> tuple[Rows, Rows]:
    front = {name: array[:, :tokens] for name, array in rows.items()}
    return front, {name: array[:, tokens:] for name, array in rows.items()}


def _moved(rows: Array, kind: str) -> Array:
    """Every element a thousandth larger, or by the last bit; of four and five bits, which have no such
    small step, as they are."""
    floats = {"f32": np.float32, "f16": np.float16}
    if kind in floats:
        larger = values(rows, kind) * np.float32(1 + _MOVED)
        return larger.astype(floats[kind]).view(rows.dtype)
    if kind == "bf16":
        return rows ^ 1
    if kind == "q8_0":
        blocks = np.ascontiguousarray(rows).reshape(*rows.shape[:-1], -1, 34).copy()
        blocks[..., 2:] ^= 1
        return blocks.reshape(rows.shape)
    return rows
