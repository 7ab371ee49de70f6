"""A disk that says no: the error is told, nothing half done is left, and a retry mends it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.errors import KvsnapError, StoreError, StoreFull, StoreReadOnly
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import READS, WRITES, failing
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(70)


def files(path: Path) -> set[str]:
    found = [*path.glob("blocks/*/*"), *path.glob("sessions/*/*"), *path.glob("tmp/*.part")]
    return {str(file.relative_to(path)) for file in found}


def loaded(store: Store, ids: Any = IDS[:64]) -> Session:
    """A session whose engine holds 4 blocks that are not saved yet."""
    session = Session(store, StampedEngine(), "chat")
    session.engine.evaluate(ids)
    return session


def assert_saved(open_store: Opener, tokens: int, blocks: int) -> None:
    engine = StampedEngine()
    turn(open_store(), engine, IDS, "chat", save=False)
    assert engine.positions == list(range(tokens, 70))
    engine.check_rows()
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])
    assert len(list(open_store().place.blocks.glob("*/*"))) == blocks
    assert not list(open_store().place.temporary.glob("*.part"))


FAULTS = [
    (WRITES, errno.ENOSPC, StoreFull),
    (WRITES, errno.EDQUOT, StoreFull),
    (WRITES, errno.EIO, StoreError),
    (("open",), errno.EROFS, StoreReadOnly),
    (("open",), errno.EMFILE, StoreError),
    (("rename", "replace"), errno.EIO, StoreError),
    (("rename", "replace"), errno.ENOSPC, StoreFull),
    (("fsync",), errno.EIO, StoreError),
    (("fsync",), errno.ENOSPC, StoreFull),
    (("mkdir",), errno.ENOSPC, StoreFull),
]


@pytest.mark.parametrize(("functions", "code", "kind"), FAULTS)
def test_a_first_save_that_fails_says_so_and_a_retry_mends_it(
    open_store: Opener, functions: tuple[str, ...], code: int, kind: type[KvsnapError]
) -> None:
    # A19, A32
    session = loaded(open_store())
    with pytest.raises(kind) as told, failing(*functions, error=code) as met:
        session.save()
    assert met
    assert told.value.what
    assert told.value.hint
    assert not list(open_store().place.temporary.glob("*.part"))
    assert not list(open_store().place.sessions.glob("*/*"))
    saved = session.save()
    assert (saved.revision, saved.blocks) == (1, 4)
    assert_saved(open_store, 64, 4)


@pytest.mark.parametrize("functions", [WRITES, ("replace", "rename")], ids=["write", "rename"])
@pytest.mark.parametrize("after", range(12))
def test_a_save_that_fails_in_the_middle_keeps_what_was_stored(
    open_store: Opener, after: int, functions: tuple[str, ...]
) -> None:
    # A32: block 2 of 4 fails in its first write or a later one: look-up ends before it.
    store = open_store()
    session = loaded(store)
    with failing(*functions, error=errno.EIO, after=after) as met:
        try:
            session.save()
        except StoreError:
            assert met
        else:
            assert not met
    stored = len(list(store.place.blocks.glob("*/*")))
    names = files(store.path)
    assert not any(name.startswith("tmp") for name in names)
    engine = StampedEngine()
    found = turn(open_store(), engine, IDS, save=False).resumed
    assert found.reused_tokens == 16 * stored
    assert not found.damage
    engine.check_rows()
    session.save()
    assert_saved(open_store, 64, 4)


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(open_store: Opener) -> None:
    # A19: write() that returns 0.
    session = loaded(open_store())
    with pytest.raises(StoreError), failing(*WRITES, result=lambda: 0):
        session.save()
    assert files(open_store().path) == set()
    session.save()
    assert_saved(open_store, 64, 4)


@pytest.mark.parametrize("step", [1, 7, 100])
def test_writes_that_take_a_part_are_gone_on_with(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: real(handle, data[:step]))
        turn(open_store(), StampedEngine(), IDS[:17], "chat")
    engine = StampedEngine()
    turn(open_store(), engine, IDS[:18], "chat")
    assert engine.positions == [17]
    engine.check_rows()


@pytest.mark.parametrize("after", range(10))
def test_a_sync_that_fails_is_told_and_the_session_is_not_called_saved(
    open_store: Opener, after: int
) -> None:
    # A32: an error of fsync comes after the data seemed to be written.
    session = loaded(open_store(), IDS[:40])
    with failing("fsync", after=after) as met:
        try:
            session.save()
        except StoreError:
            assert met
        else:
            assert not met
            return
    session.engine.evaluate(IDS[40:45])
    assert session.save().session == "chat"
    assert open_store().sessions.load("default", "chat").record.token_ids.tolist() == (
        IDS[:45].tolist()
    )
    assert {item.path.name for item in open_store().listing} == {"chat.safetensors"}
    assert_saved(open_store, 45, 2)


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_blocks_that_cannot_be_read_are_a_miss_and_are_not_set_aside(
    open_store: Opener, code: int, after: int
) -> None:
    # A33: a device error or a mode says nothing about the bytes.
    turn(open_store(), StampedEngine(), IDS[:64])
    engine = StampedEngine()
    session = Session(open_store(), engine)
    with failing(*READS, error=code, after=after) as met:
        done = session.resume(IDS)
    assert met
    assert done.reused_tokens <= 16 * after
    assert "cannot be read" in done.stopped_by
    engine.evaluate(IDS[done.reused_tokens :])
    engine.check_rows()
    assert not list(open_store().place.quarantine.glob("*"))
    assert_saved(open_store, 64, 4)


def test_a_read_that_ends_early_is_a_miss(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS[:64])
    engine = StampedEngine()
    session = Session(open_store(), engine)
    with failing(*READS, result=lambda: 0):
        done = session.resume(IDS)
    assert (done.reused_tokens, engine.held) == (0, 0)
    assert done.damage


def test_a_store_that_cannot_be_counted_in_is_good_to_read_from(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(open_store(), StampedEngine(), IDS[:64], "chat")
    store, engine = open_store(), StampedEngine()

    def refuse(*_: object, **__: object) -> None:
        raise StoreFull("no space left")

    monkeypatch.setattr(store.index, "transaction", refuse)
    turn(store, engine, IDS, "chat", save=False)
    assert engine.positions == list(range(64, 70))


def test_a_failed_save_of_a_longer_session_leaves_the_shorter_one(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), IDS[:20], "chat")
    session = turn(open_store(), StampedEngine(), IDS, "chat", save=False).session
    with pytest.raises(StoreFull), failing(*WRITES, error=errno.ENOSPC):
        session.save()
    again = Session(open_store(), StampedEngine(), "chat")
    assert again.stored_token_ids().tolist() == IDS[:20].tolist()
    assert session.save().revision == 2
