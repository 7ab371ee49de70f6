"""Write-behind: what is saved here reaches the remote in its order, and never in the way of a save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import KvsnapError, RemoteDenied, RemoteDown, UsageError
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing import behind
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import block_files, resume

Machine = Callable[..., Store]
IDS = some_ids(57)


class Gate:
    """Holds up what the remote is asked to write until it is opened; notes the order."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.written: list[str] = []

    def __call__(self, operation: str, key: str) -> None:
        if operation in ("put", "replace"):
            self.reached.set()
            assert self.open.wait(30)
            self.written.append(key)


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open.set()


def test_a_saved_session_is_there_after_a_flush(machine: Machine, remote: Counted) -> None:
    a = machine("a", remote=remote, write_behind=True)
    turn(a, StampedEngine(), IDS, "chat")
    a.flush()
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_closing_waits_for_what_is_on_its_way(machine: Machine, remote: Counted) -> None:
    with machine("a", remote=remote, write_behind=True) as a:
        turn(a, StampedEngine(), IDS, "chat")
    pull(machine("b"), remote, "chat")


def test_a_save_does_not_wait_for_the_remote(machine: Machine, remote: Counted, gate: Gate) -> None:
    a = machine("a", remote=Hooked(remote, gate), write_behind=True)
    turn(a, StampedEngine(), IDS, "chat")
    assert gate.reached.wait(30)
    turn(a, StampedEngine(), some_ids(40, 2), "another")
    assert gate.written == []
    gate.open.set()
    a.flush()


def test_sessions_go_in_the_order_of_their_saves_and_once(
    machine: Machine, remote: Counted, gate: Gate
) -> None:
    a = machine("a", remote=Hooked(remote, gate), write_behind=True)
    turn(a, StampedEngine(), IDS, "first")
    assert gate.reached.wait(30)
    for count in (10, 20, 30):
        turn(a, StampedEngine(), some_ids(count, 2), "second")
        turn(a, StampedEngine(), some_ids(count, 3), "third")
    gate.open.set()
    a.flush()
    manifests = [key for key in gate.written if key.startswith("manifests/")]
    names = [key.rsplit("/", 1)[-1].removesuffix(".safetensors") for key in manifests]
    assert names == ["first", "second", "third"]
    b = machine("b")
    pull(b, remote, "second")
    assert_saved(b, some_ids(30, 2), "second")


def test_a_full_queue_makes_a_save_wait(
    machine: Machine, remote: Counted, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(behind, "MOST_WAITING", 2)
    a = machine("a", remote=Hooked(remote, gate), write_behind=True)
    turn(a, StampedEngine(), IDS, "0")
    assert gate.reached.wait(30)
    turn(a, StampedEngine(), IDS, "1")
    turn(a, StampedEngine(), IDS, "2")
    waiting = threading.Thread(target=turn, args=(a, StampedEngine(), IDS, "3"))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    gate.open.set()
    waiting.join(30)
    assert not waiting.is_alive()
    a.flush()
    assert len(list(remote.list("manifests/"))) == 4


@pytest.mark.parametrize("error", [RemoteDown, RemoteDenied])
def test_a_failing_remote_fails_no_save_and_is_told_of_once(
    machine: Machine, remote: Counted, error: type[KvsnapError]
) -> None:
    def fail(operation: str, key: str) -> None:
        raise error("not today")

    a = machine("a", remote=Hooked(remote, fail), write_behind=True)
    for name in ("one", "two", None):
        turn(a, StampedEngine(), IDS, name)
    with pytest.raises(error, match="not today"):
        a.flush()
    a.flush()
    assert_saved(a, IDS, "one")


def test_the_next_save_sends_what_did_not_get_through(machine: Machine, remote: Counted) -> None:
    fails = [True]

    def fail(operation: str, key: str) -> None:
        if fails[0] and operation == "put":
            raise RemoteDenied("not today")

    a = machine("a", remote=Hooked(remote, fail), write_behind=True)
    session = turn(a, StampedEngine(), IDS, "chat").session
    with pytest.raises(RemoteDenied):
        a.flush()
    fails[0] = False
    session.save()
    a.flush()
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def test_a_remote_that_is_down_is_not_waited_for_once_an_item(
    machine: Machine, remote: Counted
) -> None:
    asked: list[str] = []

    def fail(operation: str, key: str) -> None:
        asked.append(key)
        raise RemoteDown("no answer")

    a = machine("a", remote=Hooked(remote, fail), write_behind=True)
    for number in range(20):
        turn(a, StampedEngine(), some_ids(40, number), str(number))
    with pytest.raises(RemoteDown):
        a.flush()
    assert len(asked) <= 2, "one by the reader, one by the writer"


def test_closing_tells_what_went_wrong_and_closes(machine: Machine, remote: Counted) -> None:
    def fail(operation: str, key: str) -> None:
        raise RemoteDenied("not today")

    with (
        pytest.raises(RemoteDenied, match="not today"),
        machine("a", remote=Hooked(remote, fail), write_behind=True) as a,
    ):
        turn(a, StampedEngine(), IDS, "chat")
    assert_saved(machine("a"), IDS, "chat")
    a.behind = a.through = None  # closed before


def test_blocks_without_a_session_are_read_through_elsewhere(
    machine: Machine, remote: Counted, there: Path
) -> None:
    a = machine("a", remote=remote, write_behind=True)
    turn(a, StampedEngine(), IDS)
    a.flush()
    assert len(block_files(there)) == 3
    assert not list(remote.list("manifests/"))
    b = machine("b", remote=remote)
    assert resume(b, IDS).positions == list(range(48, 57))
    assert sweep(remote).removed_files == 0, "they are young"
    assert sweep(remote, grace_days=-1).removed_files == 3


def test_a_chat_may_take_its_last_answer_back(machine: Machine, remote: Counted) -> None:
    """The version there is one that this store sent itself."""
    a = machine("a", remote=remote, write_behind=True)
    engine = StampedEngine()
    session = turn(a, engine, IDS, "chat").session
    a.flush()
    session.truncate(40)
    engine.evaluate(some_ids(9, 4))
    session.save()
    a.flush()
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, np.concatenate([IDS[:40], some_ids(9, 4)]), "chat")


def test_what_somebody_else_pushed_meanwhile_is_not_replaced(
    machine: Machine, remote: Counted
) -> None:
    a = machine("a", remote=remote, write_behind=True)
    b = machine("b", remote=remote, write_behind=True)
    session = turn(a, StampedEngine(), IDS, "chat").session
    a.flush()
    theirs = np.concatenate([IDS, some_ids(9, 5)])
    turn(b, StampedEngine(), theirs, "chat")
    b.flush()
    session.engine.evaluate(some_ids(9, 6))
    session.save()
    with pytest.raises(KvsnapError, match="other tokens from position 57 on"):
        a.flush()
    c = machine("c")
    pull(c, remote, "chat")
    assert_saved(c, theirs, "chat")


def test_a_session_removed_before_its_turn_is_no_error(
    machine: Machine, remote: Counted, gate: Gate
) -> None:
    a = machine("a", remote=Hooked(remote, gate), write_behind=True)
    turn(a, StampedEngine(), IDS, "first")
    assert gate.reached.wait(30)
    turn(a, StampedEngine(), IDS, "second")
    a.sessions.remove("default", "second")
    gate.open.set()
    a.flush()
    assert [entry.key for entry in remote.list("manifests/")] == [
        "manifests/default/first.safetensors"
    ]


def test_two_that_flush_both_wait(machine: Machine, remote: Counted, gate: Gate) -> None:
    a = machine("a", remote=Hooked(remote, gate), write_behind=True)
    turn(a, StampedEngine(), IDS, "chat")
    assert gate.reached.wait(30)
    turn(a, StampedEngine(), some_ids(40, 2), "next")
    first = threading.Thread(target=a.flush)
    first.start()
    first.join(0.1)
    turn(a, StampedEngine(), some_ids(40, 2), "next")
    second = threading.Thread(target=a.flush)
    second.start()
    second.join(0.2)
    assert second.is_alive(), "what it waits for is still on its way"
    gate.open.set()
    first.join(30)
    second.join(30)
    assert not first.is_alive()
    assert not second.is_alive()


def test_write_behind_needs_a_remote(machine: Machine) -> None:
    with pytest.raises(UsageError, match="needs a remote"):
        machine("a", write_behind=True)


def test_saves_in_the_background_are_sent_too(machine: Machine, remote: Counted) -> None:
    a = machine("a", remote=remote, write_behind=True)
    engine = StampedEngine()
    with Session(a, engine, "chat") as session:
        session.resume(IDS)
        engine.evaluate(IDS)
        session.save_soon()
    a.flush()
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
