"""Nothing that was reported saved is lost: what one save meets must not cost another's blocks."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, StoreError
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import failing
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(65)
Opener = Callable[[], Store]


def forget_synced(store_path: Path) -> None:
    for path in store_path.glob("index.sqlite3*"):
        path.unlink()


@pytest.mark.parametrize(("function", "error"), [("open", errno.EMFILE), ("fsync", errno.EIO)])
def test_a_failing_sync_costs_no_block_of_another_session(
    open_store: Opener, store_path: Path, function: str, error: int
) -> None:
    turn(open_store(), StampedEngine(), IDS, "mine")
    forget_synced(store_path)  # rebuilt: nothing counts as synced
    store, engine = open_store(), StampedEngine()
    done = turn(store, engine, IDS, "other", save=False)
    with failing(function, error=error) as met, pytest.raises(KvsnapError):
        done.session.save()
    assert met
    again = StampedEngine()
    assert turn(open_store(), again, IDS, "mine", save=False).computed == 1
    again.check_rows()


def test_blocks_that_could_not_be_synced_are_written_anew(open_store: Opener) -> None:
    store, engine = open_store(), StampedEngine()
    done = turn(store, engine, IDS, "mine", save=False)
    with failing("fsync"), pytest.raises(StoreError):
        done.session.save()
    assert done.session.save().blocks_written == 4
    assert all(at > 0 for (at,) in store.index.query("SELECT synced FROM blocks"))


def test_a_rash_verdict_does_not_replace_a_durable_file(open_store: Opener) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS, "mine")
    inodes = {path: path.stat().st_ino for path in store.place.blocks.rglob("*.safetensors")}
    with failing("readv", error=errno.EIO):
        assert turn(store, StampedEngine(), IDS, "other", save=False).computed == 65
    engine = StampedEngine()
    assert turn(store, engine, IDS, "other").saved is not None
    assert {path: path.stat().st_ino for path in inodes} == inodes
    assert all(at > 0 for (at,) in store.index.query("SELECT synced FROM blocks"))


def test_a_chain_whose_rows_vanish_during_a_save_is_synced_all_the_same(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    done = turn(store, StampedEngine(), IDS, "mine", save=False)
    real, emptied = store.sync, []

    def empty_once(names: list[bytes]) -> None:
        if not emptied:
            emptied.append(True)
            with store.index.transaction() as db:
                db.execute(
                    "DELETE FROM blocks WHERE start > 0 AND id = (SELECT MAX(id) FROM blocks)"
                )
        real(names)

    monkeypatch.setattr(store, "sync", empty_once)
    done.session.save()
    assert store.index.query("SELECT COUNT(*), SUM(synced > 0) FROM blocks") == [(4, 4)]


def test_notes_of_damage_are_as_closed_as_the_files(open_store: Opener) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS)
    next(store.place.blocks.rglob("*.safetensors")).write_bytes(b"x")
    turn(store, StampedEngine(), IDS, save=False)
    kept = list(store.place.quarantine.iterdir())
    assert len(kept) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_a_forked_child_and_its_parent_write_to_one_index(open_store: Opener) -> None:
    """SQLite in a child takes no locks where it was open in the parent: a parent that closes then
    deletes the log under the child."""
    store = open_store()
    turn(store, StampedEngine(), IDS, "one")
    parents, childs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        turn(store, StampedEngine(), some_ids(65, seed=2), "two")
        os.write(childs[1], b"x")
        os.read(parents[0], 1)
        for seed in range(3, 9):
            turn(store, StampedEngine(), some_ids(65, seed=seed), f"chat/{seed}")
        store.close()
        os._exit(0)
    os.read(childs[0], 1)
    store.close()
    os.write(parents[1], b"x")
    for seed in range(20, 26):
        turn(store, StampedEngine(), some_ids(65, seed=seed), f"chat/{seed}")
    assert os.waitpid(child, 0)[1] == 0
    for handle in (*parents, *childs):
        os.close(handle)
    again = open_store()
    assert again.index.query("PRAGMA integrity_check") == [("ok",)]
    assert again.index.query("SELECT COUNT(*) FROM blocks") == [(4 * 14,)]
    assert len(list(again.place.blocks.glob("*/*"))) == 4 * 14
