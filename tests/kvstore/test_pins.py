"""Pins: what a person keeps stays, whatever else is saved, until it is let go or its time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from unittest import mock

import pytest

from kvsnap.formats.errors import NotAllStored, NotFound, StoreFull
from kvsnap.kvstore import holds, pins, session_list
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.inspect import describe_session
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.session_list import Listed
from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
BYTES = 3712
Opened = Callable[..., Store]


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Move the clock of pins and leases on."""
    clock = mock.Mock()
    clock.time.side_effect = lambda: time.time() + clock.passed
    clock.passed = 0.0
    for module in (holds, pins, session_list):
        monkeypatch.setattr(module, "time", clock)

    def move(seconds: float) -> None:
        clock.passed += seconds

    return move


def put(store: Store, blocks: int, seed: int, name: str | None = None) -> None:
    turn(store, StampedEngine(), some_ids(blocks * SIZE, seed), name, codec="raw")


def fill(store: Store) -> None:
    """Put so many other blocks that whatever may go goes."""
    for seed in range(100, 112):
        put(store, 1, seed)


def listed(store: Store, name: str) -> Listed:
    return next(entry for entry in store.listing if entry.facts.name == name)


def tenant(store: Store) -> str:
    return Session(store, StampedEngine()).tenant_id


def name_at(store: Store, start: int) -> bytes:
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = ?", [start])
    return bytes(name)


def test_an_unpinned_session_loses_its_blocks_where_a_pinned_one_keeps_them(
    opened: Opened,
) -> None:
    store = opened(12)
    put(store, 4, 1, "kept")
    put(store, 4, 2, "other")
    store.pins.pin_session(tenant(store), "kept")
    fill(store)
    assert listed(store, "kept").stored_blocks == 4
    assert listed(store, "other").stored_blocks == 0
    assert listed(store, "kept").pinned_until == float("inf")
    assert listed(store, "other").pinned_until is None
    store.pins.unpin_session(tenant(store), "kept")
    fill(opened(7))
    assert listed(store, "kept").stored_blocks == 0
    assert_counts(store)


def test_a_pinned_block_keeps_all_before_it_and_nothing_after_it(opened: Opened) -> None:
    store = opened(8)
    put(store, 6, 1)
    store.pins.pin_block(name_at(store, 2 * SIZE))
    fill(store)
    starts = store.index.query(
        "SELECT start FROM blocks WHERE used <= (SELECT MIN(used) FROM blocks) OR start > 0"
    )
    assert sorted(start for (start,) in starts) == [0, SIZE, 2 * SIZE]
    store.pins.unpin_block(name_at(store, 2 * SIZE))
    fill(store)
    assert not store.index.query("SELECT 1 FROM blocks WHERE start > 0")


def test_a_pin_for_a_time_ends_with_it(opened: Opened, later: Callable[[float], None]) -> None:
    store = opened(8)
    put(store, 4, 1, "chat")
    store.pins.pin_session(tenant(store), "chat", 600)
    until = listed(store, "chat").pinned_until
    assert until is not None
    assert abs(until - time.time() - 600) < 60
    later(500)
    fill(store)
    assert listed(store, "chat").stored_blocks == 4
    later(101)
    assert listed(store, "chat").pinned_until is None
    fill(store)
    assert listed(store, "chat").stored_blocks == 0


@pytest.mark.parametrize("seconds", [None, 600])
def test_pins_outlive_the_index_and_the_process(
    opened: Opened, later: Callable[[float], None], seconds: float | None
) -> None:
    store = opened(9)
    put(store, 4, 1, "chat")
    put(store, 1, 2)
    store.pins.pin_session(tenant(store), "chat", seconds)
    ((block,),) = store.index.query("SELECT name FROM blocks ORDER BY id DESC LIMIT 1")
    store.pins.pin_block(block)
    store.close()
    for file in store.path.glob("index.sqlite3*"):
        file.unlink()
    store = opened(9)
    fill(store)
    assert listed(store, "chat").stored_blocks == 4
    assert block in stored_blocks(store.place)
    later(601)
    fill(store)
    assert listed(store, "chat").stored_blocks == (4 if seconds is None else 0)


def test_a_pinned_session_that_is_saved_again_keeps_its_new_blocks_and_lets_go_of_old_ones(
    opened: Opened,
) -> None:
    store = opened(11)
    put(store, 4, 1, "chat")
    store.pins.pin_session(tenant(store), "chat")
    put(store, 5, 2, "chat")
    fill(store)
    assert listed(store, "chat").stored_blocks == 5
    assert listed(store, "chat").pinned_until is not None
    assert store.index.query("SELECT COUNT(*) FROM blocks WHERE start = 48") == [(1,)]


def test_a_pinned_session_that_did_not_fit_keeps_what_did(opened: Opened) -> None:
    store = opened(capacity=26_300)  # six blocks, and the session's file twice
    put(store, 2, 1, "chat")
    store.pins.pin_session(tenant(store), "chat")
    with pytest.raises(NotAllStored):
        put(store, 9, 1, "chat")
    stored = listed(store, "chat").stored_blocks
    assert 2 <= stored < 9
    fill(opened(8))
    assert listed(store, "chat").stored_blocks == stored


def test_pinning_in_a_full_store_does_not_evict_what_is_pinned(opened: Opened) -> None:
    store = opened(20)
    put(store, 4, 1, "oldest")
    put(store, 4, 2, "newer")
    full = opened(capacity=disk_bytes(store.place) + 10)
    full.pins.pin_session(tenant(store), "oldest")
    assert listed(store, "oldest").stored_blocks == 4
    full.pins.pin_block(name_at_of(full, 2, 0))
    assert listed(store, "oldest").stored_blocks == 4


def name_at_of(store: Store, seed: int, number: int) -> bytes:
    engine = StampedEngine()
    engine.evaluate(some_ids(4 * SIZE, seed))
    return Session(store, engine)._writer.chain()[number].name


def test_where_all_is_pinned_a_save_says_so_and_the_session_goes_on(opened: Opened) -> None:
    store = opened(20)
    put(store, 4, 1, "chat")
    store.pins.pin_session(tenant(store), "chat")
    full = opened(capacity=disk_bytes(store.place) + 100)
    with pytest.raises(StoreFull, match=r"the store is full.*pinned"):
        put(full, 3, 2)
    with pytest.raises(StoreFull):
        put(full, 3, 2, "new")
    engine = StampedEngine()
    done = turn(full, engine, [*some_ids(4 * SIZE, 1), 5], save=False)
    assert done.resumed.reused_tokens == 4 * SIZE
    engine.check_rows()
    assert [entry.facts.name for entry in full.listing] == ["chat"]
    assert not list(full.place.temporary.glob("*.part"))
    assert_counts(full)


def test_removing_a_session_removes_its_pin(opened: Opened) -> None:
    store = opened(8)
    put(store, 4, 1, "chat")
    store.pins.pin_session(tenant(store), "chat")
    store.sessions.remove(tenant(store), "chat")
    assert not list(store.place.pins.glob("*/*"))
    fill(store)
    assert not store.index.query("SELECT 1 FROM blocks WHERE start > 0")
    put(store, 4, 1, "chat")
    assert listed(store, "chat").pinned_until is None


def test_what_is_not_there_cannot_be_pinned_and_what_is_not_pinned_not_unpinned(
    opened: Opened,
) -> None:
    store = opened(8)
    put(store, 4, 1, "chat")
    for act in [
        lambda: store.pins.pin_session(tenant(store), "nobody"),
        lambda: store.pins.pin_block(bytes(32)),
        lambda: store.pins.unpin_session(tenant(store), "chat"),
        lambda: store.pins.unpin_block(name_at(store, 0)),
    ]:
        with pytest.raises(NotFound):
            act()
    assert not list(store.place.pins.glob("*/*"))


def test_a_pin_of_which_a_kill_left_only_the_row_can_be_taken_back(opened: Opened) -> None:
    store = opened(8)
    put(store, 4, 1, "chat")
    store.pins.pin_session(tenant(store), "chat")
    next(store.place.pins.glob("*/*")).unlink()
    store.pins.unpin_session(tenant(store), "chat")
    fill(store)
    assert listed(store, "chat").stored_blocks == 0


def test_gc_makes_rows_of_pins_those_of_their_files(opened: Opened) -> None:
    store = opened(20)
    put(store, 4, 1, "chat")
    put(store, 4, 2, "other")
    for name in ("chat", "other"):
        store.pins.pin_session(tenant(store), name)
    store.place.pin(store.sessions.path(tenant(store), "other")).unlink()
    with store.index.transaction() as db:
        db.execute("DELETE FROM holds WHERE owner LIKE '%chat%'")
    gc(opened(capacity=1))
    assert listed(store, "chat").stored_blocks == 4
    assert listed(store, "other").stored_blocks == 0
    assert_counts(store)


def test_a_save_can_pin_what_it_saves(opened: Opened) -> None:
    store, engine = opened(9), StampedEngine()
    engine.evaluate(some_ids(4 * SIZE, 1))
    Session(store, engine, "chat", codec="raw").save(pinned=True)
    fill(store)
    assert listed(store, "chat").stored_blocks == 4
    assert describe_session(store, tenant(store), "chat")["pinned"]
