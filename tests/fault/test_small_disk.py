"""A disk of 4 MiB, a real one: it gets full, others fill it, it turns read-only; and back again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvsnap.formats.errors import KvsnapError, NotAllStored, StoreFull, StoreReadOnly
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 4 * 2**20
IDS = some_ids(300)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    if os.getuid() != 0 or mount("-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", path):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        (path / "store").mkdir(mode=0o700)
        text = json.dumps({"block_size": 16, "created": 1, "format": "1"})
        (path / "store" / "kvsnap.json").write_text(text)
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk alone limits the store."""
    monkeypatch.setenv("KVSNAP_CAPACITY", "unlimited")
    monkeypatch.setenv("KVSNAP_MIN_FREE", "0")


@pytest.fixture(params=["no limit", "default limits"])
def both_limits(request: pytest.FixtureRequest) -> None:
    if request.param == "no limit":
        request.getfixturevalue("no_limit")


def mount(*args: object) -> int:
    command = ["mount", *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def fill(disk: Path, leave: int = 0) -> None:
    """Another program takes all that is free, but for `leave` bytes."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with (disk / "ballast").open("ab") as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, free - leave)))


def save_pinned(store: Store, name: str, ids: TokenIds) -> Session:
    """So that no room is made at its cost, and it must stay complete."""
    session = turn(store, StampedEngine(), ids, name, save=False).session
    session.save(pinned=True)
    return session


def assert_told(error: KvsnapError) -> None:
    assert error.what
    assert error.hint


def assert_whole(path: Path, complete: dict[str, TokenIds]) -> None:
    """What was reported saved and could not be evicted is there; nothing half written is."""
    assert not list(path.glob("tmp/*.part"))
    with Store(path) as store:
        for name, ids in complete.items():
            assert_saved(store, ids, name)
        assert [bad for bad in verify_store(store).bad if Path(bad.path).exists()] == []


def assert_right(path: Path, name: str, ids: TokenIds) -> None:
    """The session is there. Blocks may have been evicted: fewer are reused, and those are right."""
    with Store(path) as store:
        engine = StampedEngine()
        session = Session(store, engine, name)
        assert session.stored_token_ids().tolist() == ids.tolist()
        report = session.resume(ids, leave=0)
        assert (report.damage, report.reused_tokens) == ((), engine.held)
        engine.check_rows()


@pytest.mark.usefixtures("no_limit")
def test_pinned_saves_without_end_fill_the_disk_and_all_that_were_reported_stay(
    disk: Path,
) -> None:
    path, reported, refused = disk / "store", dict[str, TokenIds](), 0
    with Store(path) as store:
        while refused < 3:
            assert len(reported) < 50
            name, engine = f"chat/{len(reported) + refused}", StampedEngine()
            ids = some_ids(300, seed=len(reported) + refused)
            session = turn(store, engine, ids, name, codec="raw", save=False).session
            try:
                session.save(pinned=True)
                reported[name] = ids
            except (StoreFull, NotAllStored) as error:
                refused += 1
                assert_told(error)
                engine.evaluate(some_ids(10))  # the conversation goes on
                engine.check_rows()
                assert_whole(path, reported)
    assert len(reported) > 1


def test_saves_without_end_make_room_for_each_other(disk: Path) -> None:
    path = disk / "store"
    with Store(path) as store:
        for number in range(30):
            ids = some_ids(300, number)
            turn(store, StampedEngine(), ids, f"chat/{number}", codec="raw")
            assert_whole(path, {f"chat/{number}": ids})
    for number in range(30):
        assert_right(path, f"chat/{number}", some_ids(300, number))


@pytest.mark.usefixtures("both_limits")
@pytest.mark.parametrize("leave", range(0, 160_000, 8_000))
def test_a_save_on_a_disk_with_little_room_is_refused_or_done_and_works_when_there_is_room(
    disk: Path, leave: int
) -> None:
    path = disk / "store"
    with Store(path) as store:
        save_pinned(store, "old", IDS[:100])
        session = turn(store, StampedEngine(), IDS, "chat", codec="raw", save=False).session
        fill(disk, leave)
        try:
            session.save()
            done = True
        except (StoreFull, NotAllStored) as error:
            assert_told(error)
            done = False
        reported = {"old": IDS[:100]} | ({"chat": IDS} if done else {})
        assert_whole(path, reported)
        (disk / "ballast").unlink()
        longer = np.concatenate([IDS, some_ids(20, seed=1)])
        session.engine.evaluate(longer[300:])
        session.save()
    assert_whole(path, {"old": IDS[:100], "chat": longer})


@pytest.mark.usefixtures("both_limits")
@pytest.mark.parametrize("at", range(0, 50, 5))
def test_a_disk_that_others_fill_during_a_save_costs_that_save_alone(disk: Path, at: int) -> None:
    path, real, writes = disk / "store", os.write, list[int]()

    def write(handle: int, data: memoryview) -> int:
        writes.append(len(data))
        if len(writes) == at + 1:
            fill(disk)
        return real(handle, data)

    with Store(path) as store:
        save_pinned(store, "old", IDS[:100])
        session = turn(store, StampedEngine(), IDS, "chat", codec="raw", save=False).session
        with mock.patch.object(os, "write", write), contextlib.suppress(StoreFull, NotAllStored):
            session.save()
        assert len(writes) > at
        assert_whole(path, {"old": IDS[:100]})
        (disk / "ballast").unlink()
        session.save()
    assert_whole(path, {"old": IDS[:100], "chat": IDS})


@pytest.mark.usefixtures("both_limits")
def test_a_disk_that_turns_read_only_refuses_saves_and_goes_on_to_be_read(disk: Path) -> None:
    path = disk / "store"
    with Store(path) as store:
        session = save_pinned(store, "chat", IDS[:100])
    if mount("-o", "remount,ro", disk):
        pytest.skip("remounting is not allowed here")
    session.engine.evaluate(IDS[100:])
    for _ in range(2):
        with pytest.raises(StoreReadOnly) as told:
            session.save()
        assert_told(told.value)
    session.store.close()
    again = StampedEngine()
    with Store(path) as store:
        turn(store, again, IDS[:120], "chat", save=False)
    assert again.positions == [*range(100, 120)]
    again.check_rows()
    assert mount("-o", "remount,rw", disk) == 0
    assert session.save().revision == 2
    session.store.close()
    assert_whole(path, {"chat": IDS})
