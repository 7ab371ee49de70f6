"""A sweep and a push at once: whichever comes first, the pushed session is whole in the end.

Each operation of one is a place where the other may run; all are tried.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvsnap.kvstore.sharing.push as pushing
from kvsnap.formats.errors import PartlyDone
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing import sweep_mark
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import ME, only, save_and_push

Machine = Callable[..., Store]
Waiting = Callable[[Callable[[float], None]], None]
IDS = some_ids(57)
OPERATIONS = 24
"""More than either takes up to its end here; a test that runs past the end says so."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Lets a push that waits for a sweep do something else instead; at first nothing."""

    def instead(sleep: Callable[[float], None]) -> None:
        waiting = functools.partial(sweep_mark.wait_for_sweep, sleep=sleep)
        monkeypatch.setattr(pushing, "wait_for_sweep", waiting)

    instead(lambda seconds: None)
    return instead


@pytest.fixture
def leftovers(machine: Machine, remote: Counted, there: Path) -> Store:
    """A store with a session whose blocks stand in the remote, old and named by nobody."""
    store = machine("a")
    save_and_push(store, remote, IDS, "old")
    only(there, "manifests").unlink()
    turn(store, StampedEngine(), IDS, "new")
    return store


def sweep_all(remote: Remote) -> None:
    """Everything that no manifest names is old enough."""
    sweep(remote, grace_days=-1)


def assert_whole(machine: Machine, remote: Remote) -> None:
    store = machine("reader")
    assert pull(store, remote, "new").stored_blocks == 3
    assert_saved(store, IDS, "new")


@pytest.mark.parametrize("at", range(OPERATIONS))
def test_a_whole_sweep_before_any_operation_of_a_push(
    leftovers: Store, machine: Machine, remote: Counted, at: int
) -> None:
    calls: list[str] = []

    def meanwhile(operation: str, key: str) -> None:
        calls.append(operation)
        if len(calls) == at + 1:
            sweep_all(remote)

    push(leftovers, Hooked(remote, meanwhile), ME, "new")
    if len(calls) <= at:
        sweep_all(remote)
    assert_whole(machine, remote)


@pytest.mark.parametrize("at", range(OPERATIONS))
def test_a_push_before_any_operation_of_a_sweep(
    leftovers: Store, machine: Machine, remote: Counted, no_waiting: Waiting, at: int
) -> None:
    """The push begins there, and where it waits for the sweep, the sweep goes on to its end."""
    steps = stepwise_push(leftovers, remote, no_waiting)
    calls: list[str] = []

    def meanwhile(operation: str, key: str) -> None:
        calls.append(operation)
        if len(calls) == at + 1:
            next(steps)

    sweep_all(Hooked(remote, meanwhile))
    for _ in steps:
        pass
    assert_whole(machine, remote)


def stepwise_push(store: Store, remote: Remote, instead: Waiting) -> Iterator[None]:
    """A push that stops where it waits for a sweep: in a thread, one of the two runs at a time."""
    waits, goes_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(seconds: float) -> None:
        waits.set()
        assert goes_on.wait(20)

    def work() -> None:
        try:
            push(store, remote, ME, "new")
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)
        finally:
            waits.set()

    instead(wait)
    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(20)
    yield
    goes_on.set()
    thread.join()
    if errors:
        raise errors[0]


def test_a_push_ends_whole_though_another_sweep_ended_meanwhile(
    leftovers: Store, machine: Machine, remote: Counted, no_waiting: Waiting
) -> None:
    """Two sweeps at once: the one that is done must not take away the mark of the other."""
    steps: list[Iterator[None]] = []

    def meanwhile(operation: str, key: str) -> None:
        if operation == "delete" and not steps:
            sweep(remote)  # nothing is old enough for this one: it begins and ends
            steps.append(stepwise_push(leftovers, remote, no_waiting))
            next(steps[0])

    sweep_all(Hooked(remote, meanwhile))
    for _ in steps[0]:
        pass
    assert_whole(machine, remote)


def test_the_mark_of_a_sweep_that_died_is_waited_for_so_long_only(
    leftovers: Store, machine: Machine, remote: Counted, there: Path
) -> None:
    remote.put("sweeping/0123456789abcdef", b"killed")
    with pytest.raises(PartlyDone, match=r"a sweep .* is under way"):
        push(leftovers, remote, ME, "new")
    died = time.time() - sweep_mark.STALE - 1
    os.utime(only(there, "sweeping"), (died, died))
    push(leftovers, remote, ME, "new")
    assert_whole(machine, remote)


@pytest.mark.parametrize("hours", [-24, 24])
def test_a_wrong_clock_here_moves_neither_mark_nor_grace(
    leftovers: Store, machine: Machine, remote: Counted, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours * 3600)
    assert sweep(remote, grace_days=0.5).removed_files == 0
    remote.put("sweeping/0123456789abcdef", b"at work")
    with pytest.raises(PartlyDone, match=r"a sweep .* is under way"):
        push(leftovers, remote, ME, "new")


def test_a_long_sweep_keeps_its_mark_fresh(remote: Counted) -> None:
    clock = [0.0]
    with sweep_mark.marked(remote, clock=lambda: clock[0]) as refresh:
        for _ in range(100):
            clock[0] += sweep_mark.REFRESH / 2
            refresh()
        assert 25 <= remote.calls("put") <= 52
        assert list(remote.list("sweeping/"))
    assert not list(remote.list("sweeping/"))
