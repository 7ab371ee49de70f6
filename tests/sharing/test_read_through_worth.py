"""Fetch only when that is faster than computing, where computing was measured; say so where it is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvsnap.formats.identity import root_of
from kvsnap.kvstore import break_even
from kvsnap.kvstore.curve import curve
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import save_and_push

Machine = Callable[..., Store]
IDS = some_ids(16 * 60 + 3)
FAST, SLOW = 1e-7, 1.0
"""Seconds to compute a token."""


def measured(machine: Machine, seconds_a_token: float) -> None:
    """A record of machine b: prefill so fast, and restoring from disk always worth it."""
    identity = StampedEngine().identity(16, lambda path: "")
    points = [(16, 16 * seconds_a_token), (1600, 1600 * seconds_a_token)]
    record = break_even.Record(
        prefill=curve(points),
        restore={"disk": curve([(16, 1e-9), (1600, 1e-7)])},
        model="stamped",
        codec="zstd",
        measured=1,
        machine=break_even.this_machine(),
    )
    with machine("b") as store:
        break_even.write(store.place, root_of(identity).root_id, record)


@pytest.fixture(autouse=True)
def pushed(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")


def slow(remote: Counted) -> Hooked:
    def wait(operation: str, key: str) -> None:
        if operation == "get":
            time.sleep(0.02)

    return Hooked(remote, wait)


def test_a_slow_remote_is_left_where_computing_is_faster(machine: Machine, remote: Counted) -> None:
    measured(machine, FAST)
    b = machine("b", remote=slow(remote))
    engine = StampedEngine()
    done = turn(b, engine, IDS, save=False)
    engine.check_rows()
    assert len(engine.positions) > 500, "most was computed"
    assert "not worth it" in done.resumed.stopped_by
    assert remote.calls("get") < 60


def test_it_is_not_asked_again_for_what_came_too_slowly(machine: Machine, remote: Counted) -> None:
    measured(machine, FAST)
    b = machine("b", remote=slow(remote))
    turn(b, StampedEngine(), IDS, save=False)
    for thread in threading.enumerate():
        if thread.name.startswith(("kvsnap read-through", "ThreadPoolExecutor")):
            thread.join(30)  # what is under way comes yet
    got = remote.calls("get")
    turn(b, StampedEngine(), IDS, save=False)
    assert remote.calls("get") == got


def test_a_slow_remote_is_used_where_computing_is_slower(machine: Machine, remote: Counted) -> None:
    measured(machine, SLOW)
    engine = StampedEngine()
    turn(machine("b", remote=slow(remote)), engine, IDS, save=False)
    engine.check_rows()
    assert engine.positions == [960, 961, 962]


def test_a_remote_far_away_is_not_taken_for_a_slow_one(machine: Machine, remote: Counted) -> None:
    """16 come at once: 60 blocks take four times the way, not sixty times."""
    measured(machine, 0.4 / 960)
    engine = StampedEngine()
    turn(machine("b", remote=slow(remote)), engine, IDS, save=False)
    engine.check_rows()
    assert engine.positions == [960, 961, 962]


def test_without_a_measurement_everything_is_fetched(machine: Machine, remote: Counted) -> None:
    engine = StampedEngine()
    turn(machine("b", remote=slow(remote)), engine, IDS, save=False)
    engine.check_rows()
    assert engine.positions == [960, 961, 962]
