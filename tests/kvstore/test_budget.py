"""The budget: where it may be asked for, that it arrives, and what a full store says."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.errors import StoreFull, UsageError
from kvsnap.kvstore import space
from kvsnap.kvstore.budget import DEFAULT_LEAST, DEFAULT_MOST, budget, parse_size
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import failing
from kvsnap.testing.recount import assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
BYTES = 3712
"""Of a block file of these tests."""
Opened = Callable[..., Store]


@pytest.fixture
def opened(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    for name in ("KVSNAP_CAPACITY", "KVSNAP_MIN_FREE"):
        monkeypatch.delenv(name, raising=False)
    stores: list[Store] = []

    def open_it(**options: object) -> Store:
        stores.append(Store(store_path, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def put(store: Store, blocks: int, seed: int, name: str | None = None) -> None:
    turn(store, StampedEngine(), some_ids(blocks * SIZE, seed), name, codec="raw")


def set_in_file(path: Path, **fields: object) -> None:
    settings = json.loads((path / "kvsnap.json").read_text())
    (path / "kvsnap.json").write_text(json.dumps(settings | fields))


SIZES = [
    ("20GB", 20 * 10**9),
    ("20gib", 20 * 2**30),
    ("1.5 TiB", 3 * 2**39),
    ("500M", 500 * 10**6),
    ("7kB", 7000),
    ("123", 123),
    (123, 123),
    ("1b", 1),
]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "0", 0, -1, True, 1.5, "1e9", "5 apples", "0.1b", "5GBB", None]
)
def test_what_is_no_size_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(UsageError, match="is not a size") as error:
        parse_size(text)  # type: ignore[arg-type]
    assert "20GB" in error.value.hint


@pytest.mark.parametrize("asked", ["argument", "KVSNAP_CAPACITY", "kvsnap.json"])
def test_the_capacity_arrives_wherever_it_was_asked_for(
    opened: Opened, store_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    # A51: read back from stats; just under and just over.
    size = 3 * BYTES
    if asked == "KVSNAP_CAPACITY":
        monkeypatch.setenv("KVSNAP_CAPACITY", str(size))
    elif asked == "kvsnap.json":
        set_in_file(store_path, capacity=size)
    store = opened(min_free="0", **({"capacity": size} if asked == "argument" else {}))
    found = stats(store)
    assert (found.budget_bytes, found.budget_source) == (size, asked)
    put(store, 3, seed=1)
    assert (stats(store).bytes, stats(store).evicted_blocks) == (size, 0)
    put(store, 1, seed=2)
    assert (stats(store).bytes, stats(store).evicted_blocks) == (size, 1)


def test_one_file_just_under_the_capacity_is_stored_and_one_just_over_refused(
    opened: Opened,
) -> None:
    # A51
    put(opened(capacity=BYTES, min_free="0"), 1, seed=1)
    with pytest.raises(StoreFull, match=f"{BYTES} bytes is more than the store's capacity"):
        put(opened(capacity=BYTES - 1, min_free="0"), 1, seed=2)
    assert len(stored_blocks(opened().place)) == 1


def test_an_argument_wins_over_the_environment_and_that_over_the_file(
    opened: Opened, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_in_file(store_path, capacity="3GB", min_free="3MB")
    assert opened().budget.capacity == 3 * 10**9
    monkeypatch.setenv("KVSNAP_CAPACITY", "2GB")
    monkeypatch.setenv("KVSNAP_MIN_FREE", "2MB")
    assert (opened().budget.capacity, opened().budget.min_free) == (2 * 10**9, 2 * 10**6)
    store = opened(capacity="1GB", min_free="1MB")
    assert (store.budget.capacity, store.budget.min_free) == (10**9, 10**6)
    monkeypatch.setenv("KVSNAP_CAPACITY", "")
    assert opened().budget.capacity == 3 * 10**9


def test_a_capacity_that_makes_no_sense_is_refused_with_the_place_where_it_stands(
    opened: Opened, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"^'much' is not a size$"):
        opened(capacity="much")
    monkeypatch.setenv("KVSNAP_CAPACITY", "lots")
    with pytest.raises(UsageError, match=r"'lots' is not a size \(from KVSNAP_CAPACITY\)"):
        opened()
    monkeypatch.delenv("KVSNAP_CAPACITY")
    set_in_file(store_path, capacity=[1])
    with pytest.raises(UsageError, match=r"from kvsnap\.json"):
        opened()


def test_a_store_that_nobody_set_up_takes_a_tenth_of_the_disk_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A47: a sane default.
    monkeypatch.delenv("KVSNAP_CAPACITY", raising=False)
    disk = 40 * 10**9
    monkeypatch.setattr("kvsnap.kvstore.budget._disk", lambda root: disk)
    assert budget(tmp_path).capacity == disk // 10
    assert budget(tmp_path).min_free == disk // 50
    assert budget(tmp_path).source == "default"
    disk = 10**9
    assert budget(tmp_path).capacity == DEFAULT_LEAST, "or not one conversation would fit"
    disk = 10**15
    assert budget(tmp_path).capacity == DEFAULT_MOST
    assert budget(tmp_path).min_free == 10**9


def test_a_store_without_a_limit_says_so(opened: Opened) -> None:
    store = opened(capacity="unlimited", min_free="0")
    assert (store.budget.capacity, store.budget.min_free) == (None, 0)
    assert stats(store).budget_bytes is None


def test_free_space_of_the_disk_is_kept_whatever_the_capacity(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A47: a disk of seven blocks; somebody else fills it meanwhile.
    store, others = opened(capacity="unlimited", min_free=2 * BYTES), [0]
    monkeypatch.setattr(
        space, "disk_free", lambda root: 7 * BYTES - others[0] - disk_bytes(store.place)
    )
    put(store, 5, seed=1)
    assert disk_bytes(store.place) == 5 * BYTES
    put(store, 2, seed=2)
    assert disk_bytes(store.place) == 5 * BYTES
    others[0] = 2 * BYTES
    put(store, 1, seed=3)
    assert disk_bytes(store.place) == 3 * BYTES
    others[0] = 6 * BYTES
    engine = StampedEngine()
    with pytest.raises(StoreFull, match="free on the disk"):
        turn(store, engine, some_ids(SIZE, 4))
    engine.evaluate(some_ids(5))
    engine.check_rows()
    assert_counts(store)


def test_a_disk_that_is_full_in_the_middle_of_a_file_leaves_no_part_of_it_and_no_reservation(
    opened: Opened,
) -> None:
    # A47
    store = opened(capacity=10 * BYTES, min_free="0")
    put(store, 2, seed=1)
    with failing("write", error=errno.ENOSPC, after=1) as met, pytest.raises(StoreFull):
        put(store, 2, seed=2)
    assert met
    assert not list(store.place.temporary.glob("*.part"))
    assert store.index.query("SELECT * FROM unfinished") == []
    assert_counts(store)
    put(store, 2, seed=2)
    assert len(stored_blocks(store.place)) == 4


def test_what_another_writer_reserved_cannot_be_taken(opened: Opened) -> None:
    store, other = (opened(capacity=4 * BYTES, min_free="0") for _ in range(2))
    put(store, 2, seed=1)
    room = other.space._reserve(2 * BYTES)
    assert store.space.used() == 4 * BYTES
    put(store, 1, seed=2)
    assert len(stored_blocks(store.place)) == 2, "one of the old ones went"
    room.path.write_bytes(bytes(2 * BYTES))
    assert disk_bytes(store.place) == 4 * BYTES
    other.space._give_back(room)
    put(store, 2, seed=3)
    assert len(stored_blocks(store.place)) == 4
    assert_counts(store)


def test_sessions_count_and_are_never_evicted(opened: Opened) -> None:
    store = opened(capacity=20_000, min_free="0")
    put(store, 1, 1, "a")
    put(store, 1, 2, "b")
    sessions = sum(entry.bytes for entry in store.listing)
    assert store.space.used() == sessions + 2 * BYTES
    for seed in range(3, 10):
        put(store, 1, seed)
    assert sum(entry.bytes for entry in store.listing) == sessions
    assert len(stored_blocks(store.place)) == (20_000 - sessions) // BYTES
    assert Session(store, StampedEngine(), "a").stored_token_ids().tolist() == [*some_ids(SIZE, 1)]
    assert_counts(store)
    put(store, 2, 1, "a")
    assert sum(entry.bytes for entry in store.listing) > sessions, "replaced by a longer one"
    assert_counts(store)
    store.sessions.remove(Session(store, StampedEngine()).tenant_id, "a")
    assert_counts(store)
