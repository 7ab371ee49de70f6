"""The stamped engine keeps the engine contract, and its stamps tell what they are said to tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvsnap.engines.base import Engine
from kvsnap.formats.errors import EngineError
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.stamped import ROPE, StampedEngine
from kvsnap.testing.turns import some_ids


class TestStampedF16(EngineSuite):
    element = "F16"

    def make(self) -> Engine:
        return StampedEngine(element=self.element, capacity=200)

    def make_other_batch(self) -> Engine:
        return StampedEngine(element=self.element, capacity=200, batch=3)

    def make_other_weights(self) -> Engine:
        return StampedEngine(element=self.element, capacity=200, weights="others")


class TestStampedBF16(TestStampedF16):
    element = "BF16"


class TestStampedF32(TestStampedF16):
    element = "F32"


class TestStampedRows(TestStampedF16):
    element = "rows"


@pytest.mark.parametrize(("element", "below"), [("F16", 2048), ("BF16", 256)])
def test_stamps_are_integers_that_the_type_holds_exactly(element: str, below: int) -> None:
    for rows in StampedEngine(element=element).expected(some_ids(33)).values():
        wide = rows.astype("<u4") << 16
        values = rows.view("<f2") if element == "F16" else wide.view("<f4")
        assert (values == values.astype(np.int64)).all()
        assert values.min() >= 0
        assert values.max() < below
        assert len(np.unique(values)) > below // 4


def test_rows_of_another_place_in_the_same_run_are_other_rows() -> None:
    rows = StampedEngine().expected([7] * 40)
    seen = {row.tobytes() for array in rows.values() for layer in array for row in layer}
    assert len(seen) == 2 * 2 * 40  # planes, layers, positions
    heads = {array[0, 0, at : at + 8].tobytes() for array in rows.values() for at in (0, 8)}
    assert len(heads) == 4


def test_rows_depend_on_every_token_before_them() -> None:
    one, other = some_ids(40), some_ids(40)
    other[0] += 1
    rows, changed = StampedEngine().expected(one), StampedEngine().expected(other)
    for name in rows:
        assert (rows[name][:, 39] != changed[name][:, 39]).any()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "others"},
        {"rope": None},
        {"rope": dataclasses.replace(ROPE, base=500000.0)},
        {"kv_heads": 4, "head_dim": 4},
        {"overrides": [("stamped.rope.freq_base", "1.0")]},
    ],
)
def test_rows_depend_on_the_whole_identity(change: dict[str, Any]) -> None:
    here, there = StampedEngine().expected([1, 2]), StampedEngine(**change).expected([1, 2])
    assert any((here[name] != there[name]).any() for name in here)


def test_sampling_needs_an_evaluation_since_the_last_load_or_truncation() -> None:
    # A23: a restored cache has no logits; those from before would be another prompt's.
    engine = StampedEngine()
    with pytest.raises(EngineError):
        engine.sample()
    engine.evaluate(some_ids(20))
    engine.sample()
    engine.truncate(19)
    with pytest.raises(EngineError):
        engine.sample()
    engine.evaluate(some_ids(20)[19:])
    engine.load(engine.landing(0), some_ids(0))
    with pytest.raises(EngineError):
        engine.sample()


def test_one_wrong_element_makes_another_text() -> None:
    tokens = set()
    for element in range(20):
        engine = StampedEngine(vocabulary=2**31)
        landing = engine.landing(20)
        for name, rows in engine.expected(some_ids(20)).items():
            landing.rows[name][...] = rows
        landing.rows["all.v"][1, 3, element % 16] += element > 0
        engine.load(landing, some_ids(20))
        engine.evaluate(some_ids(1, seed=2))
        tokens.add(engine.sample())
        if element:
            with pytest.raises(AssertionError, match="wrong elements in all"):
                engine.check_rows()
    assert len(tokens) == 17


def test_positions_are_counted_in_order() -> None:
    engine = StampedEngine()
    engine.evaluate(some_ids(5))
    engine.truncate(3)
    engine.evaluate(some_ids(2))
    assert engine.positions == [0, 1, 2, 3, 4, 3, 4]
    assert (engine.evaluated, engine.held) == (7, 5)
