"""Moments at which another process does something: forced here, rare in life."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import NotAllStored
from kvsnap.kvstore.database import MOST_NOTES
from kvsnap.kvstore.eviction import Plan
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import disk_bytes
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

BYTES = 3712
"""Of a block file of 16 tokens, uncompressed."""
Opener = Callable[[], Store]
IDS = some_ids(40)


def test_two_writers_that_choose_the_same_block_to_go_both_find_room(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"capacity": 12 * BYTES, "min_free": "0"}
    with Store(store_path, **limits) as one, Store(store_path, **limits) as other:
        for seed in range(12):
            turn(one, StampedEngine(), some_ids(16, seed), codec="raw")
        real, met = one.space.eviction.plan, list[int]()

        def plan_and_be_late(need: int) -> Plan:
            plan = real(need)
            if not met:
                met.append(need)
                turn(other, StampedEngine(), some_ids(16, 100), codec="raw")
            return plan

        monkeypatch.setattr(one.space.eviction, "plan", plan_and_be_late)
        saved = turn(one, StampedEngine(), some_ids(16, 200), codec="raw").saved
        assert met
        assert saved is not None
        assert saved.blocks_written == 1
        assert disk_bytes(one.place) <= 12 * BYTES


def test_a_block_that_went_and_was_stored_again_while_it_was_looked_for_is_found(
    open_store: Opener,
) -> None:
    turn(open_store(), StampedEngine(), IDS)
    store = open_store()
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 0")
    session = Session(store, StampedEngine())
    path, aside = store.place.block(name), store.path / "aside"
    real = store.blocks.set_aside

    def stored_again(*args: object, **more: object) -> bool:
        aside.rename(path)
        return real(*args, **more)  # type: ignore[arg-type]

    path.rename(aside)
    store.blocks.set_aside = stored_again  # type: ignore[method-assign]
    assert session.resume(IDS).reused_tokens == 32
    store.blocks.set_aside = real  # type: ignore[method-assign]
    assert store.blocks.misses == {}


def test_a_sync_that_failed_elsewhere_is_not_forgotten_by_one_that_succeeds(
    open_store: Opener,
) -> None:
    store, other = open_store(), open_store()
    turn(store, StampedEngine(), IDS)
    names = [name for (name,) in store.index.query("SELECT name FROM blocks")]
    other.blocks.doubt(names[:1])
    assert not store.index.mark_synced(dict.fromkeys(names, 1))
    assert turn(open_store(), StampedEngine(), IDS, "chat").saved.blocks_written == 1  # type: ignore[union-attr]


def test_an_index_that_was_set_back_does_not_vouch_for_another_file(open_store: Opener) -> None:
    """As a power cut may: the row says synced, and means the file that was evicted."""
    store = open_store()
    turn(store, StampedEngine(), IDS, "chat", codec="raw")
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 16")
    path = store.place.block(name)
    torn = bytearray(path.read_bytes())
    torn[len(torn) // 2 :] = bytes(len(torn) - len(torn) // 2)
    path.unlink()
    path.write_bytes(torn)
    engine = StampedEngine()
    engine.evaluate(IDS)
    again = open_store()
    assert Session(again, engine, "other", codec="raw").save().blocks_written == 1
    check = StampedEngine()
    turn(open_store(), check, IDS, "other", save=False)
    assert check.positions == [39]


def test_a_chat_that_fills_its_store_alone_is_saved_at_its_own_blocks_cost(
    store_path: Path,
) -> None:
    """Blocks are a cache, the conversation is not."""
    ids = some_ids(1200)
    for count in range(100, 1200, 100):
        with Store(store_path, capacity=30_000, min_free="0") as store:
            engine = StampedEngine()
            session = turn(store, engine, ids[:count], "chat", save=False).session
            with contextlib.suppress(NotAllStored):
                session.save()
            engine.check_rows()
            assert disk_bytes(store.place) <= 30_000
            found = store.sessions.load("default", "chat").record.token_ids
            assert np.array_equal(found, ids[:count])


def test_a_lower_capacity_takes_the_blocks_of_the_very_session_that_is_saved(
    store_path: Path,
) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(640), "chat", codec="raw")
    with Store(store_path, capacity=20 * BYTES, min_free="0") as store:
        engine = StampedEngine()
        session = turn(store, engine, some_ids(640), "chat", save=False).session
        with contextlib.suppress(NotAllStored):
            session.save()
        assert disk_bytes(store.place) <= 20 * BYTES


def test_what_cannot_be_written_down_does_not_pile_up(tmp_path: Path) -> None:
    store = Store(tmp_path / "nothing there")
    for _ in range(MOST_NOTES + 50):
        store.index.count_request(None, 0, 1)
        store.index.write_notes()
    assert len(store.index._noted) == MOST_NOTES


def test_an_expired_pin_leaves_no_file(open_store: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS, "chat")
    store.pins.pin_session("default", "chat", 60)
    assert len(list(store.place.pins.rglob("*.safetensors"))) == 1
    from kvsnap.kvstore import holds, pins

    later = pins.time.time() + 100
    for module in (pins, holds):
        monkeypatch.setattr(module.time, "time", lambda: later)
    gc(store)
    assert list(store.place.pins.rglob("*.safetensors")) == []
