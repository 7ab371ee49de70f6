"""What writers leave in tmp/ and blocks/ when they die: counted, and cleaned when it is safe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from kvsnap.formats.names import token_array
from kvsnap.kvstore import space, unfinished
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.killed import Killed, die, killed_between_rename_and_row
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
BYTES = 3712
Opened = Callable[..., Store]


def put(store: Store, blocks: int, seed: int) -> None:
    turn(store, StampedEngine(), some_ids(blocks * SIZE, seed), codec="raw")


def half_written(store: Store, size: int = 5000, written: int = 5000) -> Path:
    """A file that a writer of this store has reserved and begun."""
    room = store.space._reserve(size)
    store.place.temporary.mkdir(exist_ok=True)
    room.path.write_bytes(bytes(written))
    return room.path


def grow_old(path: Path) -> None:
    os.utime(path, (1, 1))


@pytest.mark.parametrize("index", ["kept", "deleted"])
@pytest.mark.parametrize("written", [1, 2500, 5000])
def test_a_dead_writers_file_counts_with_what_it_takes(
    opened: Opened, written: int, index: str
) -> None:
    # A49
    store = opened()
    put(store, 2, seed=1)
    half_written(store, written=written)
    die(store)
    if index == "deleted":
        for file in store.path.glob("index.sqlite3*"):
            file.unlink()
    after = opened()
    assert after.space.used() >= disk_bytes(after.place)
    after.space.unfinished.recount()
    assert after.space.used() == disk_bytes(after.place) == 2 * BYTES + written


def test_it_goes_after_the_grace_time_with_the_first_write_of_a_process(opened: Opened) -> None:
    store = opened()
    path = half_written(store)
    die(store)
    put(opened(), 1, seed=1)
    assert path.exists()
    grow_old(path)
    assert stored_blocks(opened().place)  # reading deletes nothing
    Session(opened(), StampedEngine()).resume(some_ids(SIZE + 1, 1))
    assert path.exists()
    put(opened(), 1, seed=2)
    assert not path.exists()
    assert_counts(opened())


def test_a_living_writers_file_never_goes_however_old(opened: Opened) -> None:
    # A49
    store = opened()
    path = half_written(store)
    grow_old(path)
    put(opened(), 2, seed=1)
    assert gc(opened(0.1)).unfinished == 0
    assert path.exists()
    assert opened().space.used() == disk_bytes(store.place)
    store.close()
    assert gc(opened(0.1)).unfinished == 1
    assert not path.exists()


def test_dead_writers_files_make_room_before_any_block_goes(opened: Opened) -> None:
    store = opened()
    put(store, 3, seed=1)
    path = half_written(store, BYTES, BYTES)
    die(store)
    grow_old(path)
    put(opened(4), 1, seed=2)
    assert not path.exists()
    assert len(stored_blocks(store.place)) == 4


@pytest.mark.parametrize(
    "name",
    ["x.part", "0123456789abcdef.part", "0123456789abcdef.0123456789ABCDEF.part", "notes.owner"],
)
def test_files_in_tmp_that_are_not_ours_stay(opened: Opened, name: str) -> None:
    store = opened()
    put(store, 1, seed=1)
    foreign = store.place.temporary / name
    foreign.write_text("mine")
    grow_old(foreign)
    gc(opened(0.1))
    put(opened(), 1, seed=2)
    assert foreign.read_text() == "mine"


def test_a_file_that_is_published_while_tmp_is_listed_is_not_counted_twice(
    opened: Opened,
) -> None:
    store, writer = opened(), opened()
    put(store, 1, seed=1)
    room = writer.space._reserve(BYTES)
    room.path.write_bytes(bytes(BYTES))
    target = store.place.block(bytes(32))
    target.parent.mkdir(parents=True, exist_ok=True)
    sizes = unfinished.files.sizes

    def list_then_publish(folder: Path) -> object:
        found = sizes(folder)
        if not room.published:
            with writer.index.transaction() as db:
                room.publish(db, target)
        return found

    with mock.patch.object(unfinished.files, "sizes", list_then_publish):
        store.space.unfinished.recount()
    assert room.published
    assert store.index.query("SELECT * FROM unfinished") == []


def kill_between_rename_and_row(store: Store, ids: Sequence[int]) -> None:
    engine = StampedEngine()
    engine.evaluate(token_array(ids))
    with killed_between_rename_and_row() as renamed:
        Session(store, engine, codec="raw").put_filled()
    assert len(renamed) == 1
    die(store)


def test_a_block_whose_writer_was_killed_before_its_row_does_not_outlive_its_parent(
    opened: Opened,
) -> None:
    put(opened(3), 2, seed=1)
    kill_between_rename_and_row(opened(3), [*some_ids(2 * SIZE, 1), *some_ids(SIZE, 2)])
    assert len(stored_blocks(opened().place)) == 3
    assert verify_store(opened()).bad == []
    for seed in range(3, 6):
        put(opened(3), 1, seed)
        assert_closed(opened())
        assert_counts(opened())
    gc(opened(3))
    assert_closed(opened())
    report = verify_store(opened())
    assert (report.bad, report.unreachable) == ([], [])


def test_the_block_of_a_killed_writer_that_another_one_stores_again_stays(opened: Opened) -> None:
    ids = some_ids(SIZE, 2).tolist()
    kill_between_rename_and_row(opened(), ids)
    turn(opened(), StampedEngine(), ids, codec="raw")
    assert gc(opened()).unfinished == 0
    assert len(stored_blocks(opened().place)) == 1
    assert_counts(opened())


def test_a_row_that_cannot_be_written_after_the_rename_leaves_no_file(opened: Opened) -> None:
    store, publish = opened(), space.Room.publish

    def rename_and_fail(room: space.Room, *args: object) -> None:
        publish(room, *args)  # type: ignore[arg-type]
        raise RuntimeError("the disk is full at COMMIT")

    with (
        mock.patch.object(space.Room, "publish", rename_and_fail),
        pytest.raises(RuntimeError),
    ):
        put(store, 1, seed=1)
    assert stored_blocks(store.place) == {}
    assert store.index.query("SELECT * FROM unfinished") == []
    put(store, 1, seed=1)
    assert_counts(store)


def test_an_eviction_that_was_killed_half_way_is_finished_by_the_next_writer(
    opened: Opened,
) -> None:
    store = opened()
    put(store, 4, seed=1)
    plan = store.space.eviction.plan(2 * BYTES)
    killed = mock.patch.object(store.space.unfinished, "finish", side_effect=Killed)
    with killed, pytest.raises(Killed):
        store.space.eviction.apply(plan)
    die(store)
    assert len(stored_blocks(store.place)) == 4
    assert opened().space.used() == 4 * BYTES
    put(opened(), 1, seed=2)
    assert len(stored_blocks(store.place)) == 3
    assert_closed(opened())
    assert_counts(opened())


def test_a_block_that_is_stored_again_while_it_is_being_evicted_stays(opened: Opened) -> None:
    store = opened()
    put(store, 2, seed=1)
    plan = store.space.eviction.plan(BYTES)
    transaction = store.index.transaction
    calls = []

    def between(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            put(opened(), 2, seed=1)
        return transaction(*args, **options)  # type: ignore[arg-type]

    with mock.patch.object(store.index, "transaction", between):
        assert store.space.eviction.apply(plan).blocks == []
    assert len(stored_blocks(store.place)) == 2
    assert_counts(opened())
    assert verify_store(opened()).bad == []
