"""gc: within the budget afterwards, what a dry run says is what happens, and leftovers are tidied."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from kvsnap.kvstore import gc as gc_module
from kvsnap.kvstore.gc import GcReport, gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
BYTES = 3712
Opened = Callable[..., Store]


def put(store: Store, blocks: int, seed: int, name: str | None = None) -> None:
    turn(store, StampedEngine(), some_ids(blocks * SIZE, seed), name, codec="raw")


def tree(store: Store) -> dict[str, int]:
    """Every file but the index's own, with its length."""
    files = [path for path in store.path.rglob("*") if path.is_file()]
    return {str(p): p.stat().st_size for p in files if not p.name.startswith("index")}


def same(planned: GcReport, done: GcReport) -> bool:
    return dataclasses.replace(planned, dry_run=False) == done


@pytest.mark.parametrize("blocks", [0.5, 1, 3, 4.5, 7])
def test_a_dry_run_deletes_nothing_and_says_what_gc_then_does(
    opened: Opened, blocks: float
) -> None:
    put(opened(), 4, seed=1)
    put(opened(), 3, seed=2)
    store = opened(blocks)
    before = tree(store)
    planned = gc(store, dry_run=True)
    assert tree(store) == before
    done = gc(store)
    assert same(planned, done)
    assert done.evicted == 7 - int(blocks)
    assert done.freed_bytes == sum(before.values()) - sum(tree(store).values())
    assert done.kept_bytes == disk_bytes(store.place) == int(blocks) * BYTES
    assert done.short_bytes == 0
    assert_closed(store)
    assert_counts(store)


def test_a_dry_run_knows_of_dead_leases_expired_pins_orphans_and_uncounted_sessions(
    opened: Opened,
) -> None:
    store = opened()
    put(store, 4, seed=1)
    put(store, 3, 2, "chat")
    tenant = Session(store, StampedEngine()).tenant_id
    store.pins.pin_session(tenant, "chat", -5)
    dead = opened()
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 48")
    dead.holds.lease().__enter__().keep(name)
    dead.index.close()
    dead.owner.forget()
    with store.index.transaction() as db:
        db.execute("DELETE FROM sessions")
        db.execute("DELETE FROM blocks WHERE start = 32 AND children = 0 AND holds = 0")
    small = opened(capacity=2 * BYTES + 2500)
    planned = gc(small, dry_run=True)
    assert same(dataclasses.replace(planned, adopted=0), dataclasses.replace(gc(small), adopted=0))
    assert planned.evicted == 5
    assert disk_bytes(small.place) <= 2 * BYTES + 2500
    assert_counts(small)


def test_what_cannot_go_is_told(opened: Opened) -> None:
    store = opened()
    put(store, 2, 1, "chat")
    store.pins.pin_session(Session(store, StampedEngine()).tenant_id, "chat")
    store = opened(capacity=1)
    report = gc(store)
    assert report.evicted == 0
    assert report.kept_bytes == disk_bytes(store.place)
    assert report.short_bytes == report.kept_bytes - 1


def test_quarantine_goes_before_any_block(opened: Opened) -> None:
    put(opened(), 3, seed=1)
    store = opened(3)
    store.place.quarantine.mkdir()
    (store.place.quarantine / "damaged").write_bytes(bytes(1000))
    planned, done = gc(store, dry_run=True), gc(store)
    assert same(planned, done)
    assert (done.quarantined, done.evicted, done.freed_bytes) == (1, 0, 1000)
    assert len(stored_blocks(store.place)) == 3


def test_sessions_that_lose_the_end_of_their_chain_are_named(opened: Opened) -> None:
    put(opened(), 3, 1, "old")
    put(opened(), 3, 2, "new")
    sessions = sum(entry.bytes for entry in opened().listing)
    report = gc(opened(capacity=sessions + 4 * BYTES))
    assert (report.evicted, report.sessions_cut) == (2, ("old",))
    listed = {entry.facts.name: entry for entry in opened().listing}
    assert (listed["old"].stored_blocks, listed["new"].stored_blocks) == (1, 3)
    assert {entry.facts.blocks for entry in listed.values()} == {3}


def test_a_file_without_a_row_counts_and_can_be_used_after_gc(opened: Opened) -> None:
    store = opened()
    put(store, 3, seed=1)
    for start in (32, 16):
        with store.index.transaction() as db:
            db.execute("DELETE FROM blocks WHERE start = ?", (start,))
    assert store.space.used() == BYTES
    report = gc(store)
    assert (report.adopted, report.evicted, report.kept_bytes) == (2, 0, 3 * BYTES)
    engine = StampedEngine()
    ids = some_ids(3 * SIZE + 1, 1)
    assert turn(opened(), engine, ids, save=False).resumed.reused_tokens == 3 * SIZE
    engine.check_rows()
    assert_counts(store)


def test_a_row_without_a_file_is_told_and_counts_no_more(opened: Opened) -> None:
    store = opened()
    put(store, 3, seed=1)
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 32")
    store.place.block(name).unlink()
    report = gc(store)
    assert (report.vanished, report.kept_bytes) == (1, 2 * BYTES)
    put(store, 3, seed=1)
    assert gc(store).vanished == 0
    assert verify_store(store).bad == []
    assert_counts(store)


def test_two_gcs_at_once_free_what_one_would_and_count_right(opened: Opened) -> None:
    # A39
    for seed in range(30):
        put(opened(), 2, seed)
    stores = [opened(10) for _ in range(4)]

    def run(store: Store) -> GcReport:
        try:
            return gc(store)
        finally:
            store.index.close()

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(run, stores))
    gone = 60 - len(stored_blocks(stores[0].place))
    assert gone == sum(report.evicted for report in done) >= 50
    assert sum(report.freed_bytes for report in done) == gone * BYTES
    assert_closed(opened())
    assert_counts(opened())
    assert verify_store(opened()).bad == []


CHANGES: dict[str, Callable[[Store, bytes], object]] = {
    "used": lambda store, name: (store.index.count_request(name, 0, 0), store.index.write_notes()),
    "pinned": lambda store, name: store.pins.pin_block(name),
    "leased": lambda store, name: store.holds.lease().__enter__().keep(name),
    "removed": lambda store, name: store.place.block(name).unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_is_needed_after_the_plan_was_made_stays(opened: Opened, change: str) -> None:
    store, other = opened(), opened()
    put(store, 1, seed=1)
    put(store, 2, seed=2)
    ((name,),) = store.index.query("SELECT name FROM blocks ORDER BY id LIMIT 1")
    plan = store.space.eviction.plan(2 * BYTES)
    assert plan.blocks[0].name == name
    CHANGES[change](other, name)
    freed = store.space.eviction.apply(plan)
    gone = change == "removed"
    assert (name in freed.blocks) == gone
    assert (name in stored_blocks(store.place)) != gone
    assert len(freed.blocks) == 1 + gone
    assert_counts(store)


def test_a_block_that_is_continued_after_the_plan_was_made_stays(opened: Opened) -> None:
    store = opened()
    put(store, 1, seed=1)
    plan = store.space.eviction.plan(BYTES)
    turn(opened(), StampedEngine(), [*some_ids(SIZE, 1), *some_ids(SIZE, 2)], codec="raw")
    assert store.space.eviction.apply(plan).blocks == []
    assert len(stored_blocks(store.place)) == 2


def test_an_orphan_that_another_gc_evicts_meanwhile_gets_no_row(opened: Opened) -> None:
    store = opened()
    put(store, 1, seed=1)
    ((name,),) = store.index.query("SELECT name FROM blocks")
    with store.index.transaction() as db:
        db.execute("DELETE FROM blocks")
    read = gc_module.read_ours

    def read_and_lose(path: Path) -> object:
        found = read(path)
        path.unlink()
        return found

    with mock.patch.object(gc_module, "read_ours", read_and_lose):
        assert gc(store).adopted == 0
    assert store.index.find(name) is None
    assert verify_store(store).bad == []


def test_foreign_files_are_left_alone(opened: Opened) -> None:
    store = opened()
    put(store, 2, seed=1)
    foreign = [
        store.path / "notes.txt",
        store.place.blocks / "README",
        store.place.temporary / "mine.part",
        store.place.blocks / "ab" / "x.safetensors",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (1, 1))
    assert gc(opened(capacity=1)).evicted == 2
    assert [path.read_text() for path in foreign] == ["mine"] * 4


def test_progress_ends_at_all_blocks(opened: Opened) -> None:
    for seed in range(20):
        put(opened(), 1, seed)
    seen: list[tuple[int, int]] = []
    gc(opened(capacity=1), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(16, 20), (20, 20)]


def test_a_gc_in_an_empty_or_missing_store_does_nothing(opened: Opened, tmp_path: Path) -> None:
    assert gc(opened(capacity=1)).evicted == 0
    with Store(tmp_path / "none", capacity=1, min_free="0") as store:
        assert gc(store, dry_run=True).kept_bytes == 0
    assert not (tmp_path / "none").exists()


def test_a_kill_within_an_eviction_leaves_files_without_rows_and_never_the_reverse(
    opened: Opened,
) -> None:
    for number in range(7):
        put(opened(), 6, seed=number)
        store = opened(0.5)
        plan = store.space.eviction.plan(4 * BYTES)
        killed = mock.patch.object(store.space.unfinished, "finish", side_effect=KeyboardInterrupt)
        with killed, pytest.raises(KeyboardInterrupt):
            store.space.eviction.apply(plan)
        assert store.space.used() == disk_bytes(store.place)
        store.index.close()
        store.owner.forget()
        assert verify_store(opened()).bad == []
        report = gc(opened())
        assert (report.adopted, report.vanished) == (0, 0)
        assert report.unfinished >= 4
        assert_closed(opened())
        assert_counts(opened())
