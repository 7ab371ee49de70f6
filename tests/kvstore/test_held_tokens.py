"""What an engine holds already is reused first and stays bit for bit; only the rest is loaded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


@pytest.mark.parametrize("name", [None, "chat"], ids=["blocks", "with-tail"])
@pytest.mark.parametrize("batch", [8, 16, 24])
@pytest.mark.parametrize("held", [0, 1, 7, 15, 16, 17, 32, 33, 40, 47, 48, 51])
def test_resident_positions_are_reused_and_left_as_they_are(
    open_store: Opener, held: int, batch: int, name: str | None
) -> None:
    # A25: 3 full blocks are stored, in a variant with a tail of 4; the engine's pages are 8 to 24.
    ids = some_ids(60)
    turn(open_store(), StampedEngine(batch=batch), ids[:52], name)
    engine = StampedEngine(batch=batch)
    engine.evaluate(ids[:held])
    before = engine.export(0, held)
    done = Session(open_store(), engine, name).resume(ids)
    stored = 52 if name else 48
    assert done.reused_tokens == max(held, stored)
    assert done.from_store == max(0, stored - held)
    assert engine.token_ids().tolist() == ids[: max(held, stored)].tolist()
    for plane, rows in engine.export(0, held).items():
        assert np.array_equal(rows, before[plane])
    engine.evaluate(ids[done.reused_tokens :])
    assert engine.positions == [*range(held), *range(max(held, stored), 60)]
    engine.check_rows()


def test_resident_rows_are_not_replaced_by_stored_ones(store: Store) -> None:
    """An engine's own rounding may differ from a stored run's: what is there stays there."""
    ids = some_ids(49)
    turn(store, StampedEngine(), ids)
    engine = StampedEngine()
    landing = engine.landing(20)
    for name, rows in engine.expected(ids[:20]).items():
        landing.rows[name][...] = rows + 1
    engine.load(landing, ids[:20])
    before = engine.export(0, 20)
    assert Session(store, engine).resume(ids).reused_tokens == 48
    for name, rows in engine.export(0, 48).items():
        assert np.array_equal(rows[:, :20], before[name])
        assert np.array_equal(rows[:, 20:], engine.expected(ids[:48])[name][:, 20:])


@pytest.mark.parametrize("kept", [0, 10, 16, 33])
def test_what_the_prompt_does_not_go_on_with_is_forgotten(open_store: Opener, kept: int) -> None:
    ids = some_ids(60)
    engine = StampedEngine()
    engine.evaluate(np.concatenate([ids[:kept], some_ids(50, seed=7)]))
    before = engine.evaluated
    done = turn(open_store(), engine, ids)
    assert engine.evaluated - before == 60 - kept
    assert (done.resumed.reused_tokens, done.resumed.from_store) == (kept, 0)
    assert engine.token_ids().tolist() == ids.tolist()
    engine.check_rows()


def test_a_warm_up_request_before_the_resume_changes_nothing(open_store: Opener) -> None:
    # A16's variant.
    turn(open_store(), StampedEngine(), some_ids(60), "chat")
    engine = StampedEngine()
    engine.evaluate(some_ids(3, seed=8))
    turn(open_store(), engine, [*some_ids(60), 7], "chat")
    assert engine.positions == [0, 1, 2, 60]
    engine.check_rows()
