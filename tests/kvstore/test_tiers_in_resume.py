"""A store with a tier in memory, and one that knows how fast this machine is: what resume does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvsnap.formats import names
from kvsnap.formats.errors import UsageError
from kvsnap.kvstore import break_even
from kvsnap.kvstore.break_even import Record, key_of, this_machine
from kvsnap.kvstore.curve import curve
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(70)


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    """With 1 MB of memory in front."""
    with Store(store_path, ram="1MB") as opened:
        yield opened


def ram_of(store: Store) -> Ram:
    assert store.blocks.ram is not None
    return store.blocks.ram


def again(store: Store, ids: Sequence[int] = IDS) -> tuple[StampedEngine, str]:
    """A new engine resumes: what it had to compute is in `positions`."""
    engine = StampedEngine()
    done = turn(store, engine, ids, save=False)
    engine.check_rows()
    return engine, done.resumed.stopped_by


def test_what_was_saved_is_read_from_memory(store: Store) -> None:
    turn(store, StampedEngine(), IDS)
    assert len(ram_of(store)) == 4
    engine, _ = again(store)
    assert engine.positions == list(range(64, 70))
    assert ram_of(store).hits == 4


def test_what_was_read_once_is_read_from_memory_then(store_path: Path, store: Store) -> None:
    with Store(store_path) as other:
        turn(other, StampedEngine(), IDS)
    for hits in (0, 4):
        engine, _ = again(store)
        assert engine.positions == list(range(64, 70))
        assert ram_of(store).hits == hits


def test_files_that_went_away_or_were_damaged_later_do_not_matter(store: Store) -> None:
    turn(store, StampedEngine(), IDS)
    for path in store.place.blocks.rglob("*.safetensors"):
        flip(path, path.stat().st_size // 2, 1)
    engine, _ = again(store)
    assert engine.positions == list(range(64, 70))
    shutil.rmtree(store.place.blocks)
    engine, _ = again(store)
    assert engine.positions == list(range(64, 70))


def test_memory_and_disk_give_one_prefix(store_path: Path) -> None:
    with Store(store_path) as other:
        turn(other, StampedEngine(), IDS)
    cost = 16 * (StampedEngine().layout.token_bytes() + 4)
    with Store(store_path, ram=2 * cost) as store:
        for _ in range(2):
            engine, _ = again(store)
            assert engine.positions == list(range(64, 70))
        assert len(ram_of(store)) == 2
        assert ram_of(store).hits == 2


def test_a_collision_in_memory_is_a_miss_that_ends(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weak(key: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        return bytes([bytes(parts[0])[0] + 1]) + bytes(31)

    monkeypatch.setattr(names, "keyed_hash", weak)
    turn(store, StampedEngine(), IDS)
    other = [*IDS[:20], *some_ids(50, seed=2)]
    engine, why = again(store, other)
    assert why.startswith("damaged")
    assert set(range(32, 70)) <= set(engine.positions)


def test_a_tier_that_is_no_size_is_refused(store_path: Path) -> None:
    with pytest.raises(UsageError):
        Store(store_path, ram="much")


def measured(restoring: float) -> Record:
    return Record(
        prefill=curve([(1, 0.001), (64, 0.064)]),
        restore={"disk": curve([(64, restoring)]), "memory": curve([(64, 0.001)])},
        model="m",
        codec="raw",
        measured=1,
        machine=this_machine(),
    )


def write(store: Store, record: Record) -> None:
    key = key_of(Session(store, StampedEngine()).root.identity)
    break_even.write(store.place, key, record)


@pytest.mark.parametrize(("restoring", "computed"), [(0.01, 6), (1.0, 70)])
def test_a_restore_that_would_be_slower_is_skipped_and_the_report_says_so(
    store_path: Path, restoring: float, computed: int
) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS)
        write(store, measured(restoring))
    with Store(store_path) as store:
        engine, why = again(store)
    assert len(engine.positions) == computed
    skipped = "not worth it: restoring 64 tokens takes about 1.0 s, computing them 64 ms"
    assert why == (skipped if computed == 70 else "end of stored chain")


def test_what_is_in_memory_is_restored_where_the_disk_would_be_too_slow(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS)
        write(store, measured(1.0))
    with Store(store_path, ram="1MB") as store:
        engine, why = again(store)
        assert (len(engine.positions), why[:12]) == (70, "not worth it")
        turn(store, engine, [*IDS, 1], "chat")
        assert len(ram_of(store)) == 0, "the blocks were on the disk: nothing was written or read"
        store.break_even = break_even.BreakEven({})
        again(store)
        store.break_even = break_even.read(store.place)
        engine, why = again(store)
        assert (len(engine.positions), why) == (6, "end of stored chain")


def test_the_next_resume_is_judged_anew(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS)
        write(store, measured(1.0))
    with Store(store_path) as store:
        session = Session(store, StampedEngine())
        assert session.resume(IDS).stopped_by.startswith("not worth it: ")
        store.break_even = break_even.BreakEven({})
        assert session.resume(IDS).stopped_by == "end of stored chain"


def test_a_record_of_another_machine_keeps_nobody_from_restoring(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS)
        write(store, replace(measured(1.0), machine="another"))
    with Store(store_path) as store:
        engine, _ = again(store)
    assert len(engine.positions) == 6
