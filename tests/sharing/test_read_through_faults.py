"""Read-through from a remote that is down, damaged or full of lies, or into a store that is full: every
resume works, with a reason, and asks no more than it must."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, RemoteDenied, RemoteDown, StoreReadOnly
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import Turn, some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import block_files, only, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(16 * 12 + 5)
MORE = np.concatenate([IDS, some_ids(20, 8)])


@pytest.fixture(autouse=True)
def pushed(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")


def patient(remote: Counted) -> Hooked:
    """The remote, and an end to a resume that asks it without end."""
    asked: list[str] = []

    def note(operation: str, key: str) -> None:
        asked.append(key)
        assert len(asked) < 300, "it asks without end"

    return Hooked(remote, note)


def ask(store: Store, ids: np.ndarray, name: str | None = None) -> tuple[StampedEngine, Turn]:
    """A resumed prompt with every row checked."""
    engine = StampedEngine()
    done = turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine, done


@pytest.mark.parametrize("error", [RemoteDown, RemoteDenied])
def test_a_remote_that_fails_costs_one_question_and_says_so(
    machine: Machine, remote: Counted, error: type[Exception]
) -> None:
    asked: list[str] = []

    def fail(operation: str, key: str) -> None:
        asked.append(operation)
        assert len(asked) < 200, "it asks without end"
        raise error("no such luck")

    b = machine("b", remote=Hooked(remote, fail))
    for _ in range(20):
        engine, done = ask(b, IDS)
        assert engine.positions == list(range(197))
        assert any("no such luck" in line for line in done.resumed.damage)
    assert len(asked) <= (1 if error is RemoteDown else 20)


def test_a_remote_that_hangs_costs_one_timeout_in_twenty_resumes(
    machine: Machine, remote: Counted
) -> None:
    """A53: HEAD answers, GET hangs until its time is over."""
    hung: list[str] = []

    def hang(operation: str, key: str) -> None:
        if operation == "get":
            hung.append(key)
            assert len(hung) < 200
            raise RemoteDown("no answer within 0.2 s")

    b = machine("b", remote=Hooked(remote, hang))
    reports = [ask(b, IDS)[1].resumed for _ in range(20)]
    assert [report.reused_tokens for report in reports] == [0] * 20
    assert any("no answer within 0.2 s" in line for line in reports[0].damage)
    assert len(hung) <= 16, "one round of gets at once"


def test_local_blocks_are_used_where_the_remote_hangs(machine: Machine, remote: Counted) -> None:
    def hang(operation: str, key: str) -> None:
        if operation == "get":
            raise RemoteDown("no answer")

    b = machine("b", remote=Hooked(remote, hang))
    turn(b, StampedEngine(), IDS[:80])
    engine, _ = ask(b, IDS)
    assert engine.positions == list(range(80, 197))


def test_what_a_listing_promises_and_nobody_has_is_no_hit(
    machine: Machine, remote: Counted, there: Path
) -> None:
    """A52: the object is gone, its size is still told; two lookups, one question each."""
    gone = block_files(there)[2]
    key = str(gone.relative_to(there))
    size = gone.stat().st_size
    gone.unlink()

    class Remembers(Hooked):
        def size(self, asked: str) -> int | None:
            return size if asked == key else super().size(asked)

    got: list[str] = []

    def note(operation: str, asked: str) -> None:
        if operation == "get" and asked == key:
            got.append(asked)
            assert len(got) < 50

    b = machine("b", remote=Remembers(remote, note))
    for _ in range(2):
        engine, _ = ask(b, IDS)
        assert engine.positions == list(range(32, 197))
    assert len(got) == 1


def test_a_passing_failure_does_not_change_what_is_known(machine: Machine, remote: Counted) -> None:
    """A52, the other half: 503 is no 404."""
    fails = [True]

    def fail(operation: str, key: str) -> None:
        if operation == "get" and fails[0]:
            raise RemoteDown("503")

    hooked = Hooked(remote, fail)
    ask(machine("b", remote=hooked), IDS)
    fails[0] = False
    engine, _ = ask(machine("b", remote=hooked), IDS)  # another process, with no memory of it
    assert engine.positions == list(range(192, 197))


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "another", "far too long", "a link"])
def test_a_damaged_block_there_is_asked_for_once(
    machine: Machine, remote: Counted, there: Path, kind: str
) -> None:
    files = block_files(there)
    path, other = files[5], files[6]
    data = path.read_bytes()
    path.unlink()
    if kind == "a link":
        path.symlink_to(other)
    else:
        changed = {
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "cut": data[:-1],
            "empty": b"",
            "another": other.read_bytes(),
            "far too long": data,
        }
        path.write_bytes(changed[kind])
    if kind == "far too long":
        os.truncate(path, 2**33)
    asked: list[str] = []

    def note(operation: str, key: str) -> None:
        asked.append(key)
        assert len(asked) < 300, "it asks without end"

    b = machine("b", remote=Hooked(remote, note))
    for _ in range(3):
        engine, done = ask(b, IDS)
        assert engine.positions == list(range(80, 197))
        assert done.resumed.damage
    gets = [key for key in asked if key == str(path.relative_to(there))]
    assert len(gets) <= 3
    b.close()
    assert_clean(machine("b"))


def test_an_object_that_may_not_be_read_is_no_endless_loop(
    machine: Machine, remote: Counted
) -> None:
    asked: list[str] = []

    def deny(operation: str, key: str) -> None:
        asked.append(key)
        assert len(asked) < 300, "it asks without end"
        if operation == "get" and key.startswith("blocks/"):
            raise RemoteDenied("403")

    b = machine("b", remote=Hooked(remote, deny))
    engine, done = ask(b, IDS)
    assert engine.positions == list(range(197))
    assert any("403" in line for line in done.resumed.damage)


@pytest.mark.parametrize("folder", ["manifests", "sessions"])
def test_a_session_that_is_damaged_there_starts_anew(
    machine: Machine, remote: Counted, there: Path, folder: str
) -> None:
    path = only(there, folder)
    path.write_bytes(path.read_bytes()[:-1])
    b = machine("b", remote=remote)
    engine, done = ask(b, IDS, "chat")
    assert engine.positions == list(range(192, 197))
    assert any("cannot be used" in line or "damaged" in line for line in done.resumed.damage)
    done.session.save()


def test_a_session_of_other_block_sizes_there_starts_anew(
    machine: Machine, remote: Counted
) -> None:
    b = machine("b", block_size=32, remote=remote)
    engine, done = ask(b, IDS, "chat")
    assert engine.positions == list(range(197))
    assert done.resumed.damage
    done.session.save()


def test_a_store_that_cannot_be_written_still_resumes(
    machine: Machine, remote: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise StoreReadOnly("cannot write to the store")

    b = machine("b", remote=patient(remote))
    turn(b, StampedEngine(), IDS[:80])
    monkeypatch.setattr(b.space, "write", refuse)
    for name in (None, "chat"):
        engine, done = ask(b, IDS, name)
        assert engine.positions == list(range(80, 197))
        assert any("cannot write" in line for line in done.resumed.damage) or name is None
    assert remote.calls("get") < 100


def test_a_full_store_takes_what_fits_and_computes_the_rest(
    machine: Machine, remote: Counted
) -> None:
    b = machine("b", capacity=6 * 3500, min_free="0", remote=patient(remote))
    engine, _ = ask(b, IDS)
    assert 16 < engine.positions[0] < 192
    b.close()
    assert_clean(machine("b"))


def test_damage_is_an_answer_and_no_error(machine: Machine, remote: Counted, there: Path) -> None:
    """Whatever stands in the remote, resuming works."""
    for path in there.rglob("*.safetensors"):
        path.write_bytes(b"\0" * 100)
    b = machine("b", remote=remote)
    for name in (None, "chat"):
        engine, _ = ask(b, IDS, name)
        assert engine.positions == list(range(197))
    with pytest.raises(Damaged):
        b.find_session("chat", None)
