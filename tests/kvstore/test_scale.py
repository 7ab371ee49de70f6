"""Nothing that a request or a listing does walks the store: ten times the blocks, the same work.

Work is counted, not timed: steps of SQLite's virtual machine, and calls of the operating system.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from numpy.random import PCG64, Generator

from kvsnap.formats.names import block_name, chain_names
from kvsnap.kvstore import database, sqlite
from kvsnap.kvstore.match import longest_prefix
from kvsnap.kvstore.measure import synthetic
from kvsnap.kvstore.measure.synthetic import BLOCK_SIZE, ROOT
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.kvstore.wanted import Wanted
from kvsnap.testing.calls import watching

SMALL, LARGE = 200, 2000
DEPTH = synthetic.long_chain(SMALL)
IDS = synthetic.long_ids(DEPTH)
NAMES = chain_names(ROOT.key, IDS, BLOCK_SIZE)
_SEEDS = itertools.count(7)
"""Two tests must not put the same block."""


class Steps:
    """Counts what SQLite does in every connection that is opened while this stands in."""

    def __init__(self) -> None:
        self.count = 0

    def connect(self, path: Path) -> sqlite3.Connection:
        connection = _connect(path)
        connection.set_progress_handler(self._step, 1)
        return connection

    def _step(self) -> None:
        self.count += 1


_connect = database.connect


@dataclass
class Opened:
    store: Store
    random: Generator

    def new_block(self, after: int) -> Wanted:
        ids = synthetic.some_ids(self.random, BLOCK_SIZE)
        name = block_name(ROOT.key, NAMES[after], ids)
        return Wanted(name, NAMES[after], (after + 1) * BLOCK_SIZE, ids)


def look_up(opened: Opened) -> None:
    match = longest_prefix(opened.store.blocks, ROOT, NAMES, IDS, BLOCK_SIZE, len(IDS))
    assert match.tokens == len(IDS)


def look_up_nothing(opened: Opened) -> None:
    ids = synthetic.some_ids(opened.random, len(IDS))
    names = chain_names(ROOT.key, ids, BLOCK_SIZE)
    match = longest_prefix(opened.store.blocks, ROOT, names, ids, BLOCK_SIZE, len(ids))
    assert match.tokens < BLOCK_SIZE


def put(opened: Opened) -> None:
    rows = synthetic.rows_of(BLOCK_SIZE)
    with opened.store.holds.lease() as lease:
        lease.keep(NAMES[-1])
        block = opened.new_block(DEPTH - 1)
        assert opened.store.blocks.put(ROOT, block, synthetic.CODEC, synthetic.LAYOUT, rows, lease)


def evict(opened: Opened) -> None:
    assert opened.store.space.eviction.make_room(1)


def list_sessions(opened: Opened) -> None:
    assert len(list(opened.store.listing)) == 1


def pin_and_unpin(opened: Opened) -> None:
    opened.store.pins.pin_block(NAMES[-2])
    opened.store.pins.unpin_block(NAMES[-2])


def count_request(opened: Opened) -> None:
    opened.store.index.count_request(NAMES[-1], 64, 1)
    opened.store.index.write_notes()


def open_again(opened: Opened) -> None:
    with Store(opened.store.path) as store:
        assert store.index.is_reachable(NAMES[0])


WORKS: list[Callable[[Opened], object]] = [
    open_again,
    look_up,
    look_up_nothing,
    put,
    evict,
    lambda opened: stats(opened.store),
    list_sessions,
    pin_and_unpin,
    count_request,
    lambda opened: opened.store.sync(NAMES),
]
NAMES_OF_WORKS = [
    "open", "look-up", "look-up of nothing", "put", "evict", "stats", "ls", "pin", "request", "sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two stores of one shape; each with one session, as stats and ls read all of them."""
    folders = {}
    for blocks in (SMALL, LARGE):
        folders[blocks] = tmp_path_factory.mktemp("store") / str(blocks)
        found = synthetic.build(folders[blocks], blocks)
        assert found.blocks == blocks
        for path in sorted((folders[blocks] / "sessions").glob("*/*"))[1:]:
            path.unlink()
    return folders


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()
    monkeypatch.setattr(database, "connect", steps.connect)
    return steps


@pytest.fixture
def opened(built: dict[int, Path], counted: Steps) -> Iterator[dict[int, Opened]]:
    seed = next(_SEEDS)
    found = {n: Opened(Store(path), Generator(PCG64(seed))) for n, path in built.items()}
    for each in found.values():
        each.store.pins.pin_block(NAMES[-1])  # what others look up must not be evicted here
        put(each)  # folders, settings and clearing up: once a process
        stats(each.store)
    yield found
    for each in found.values():
        each.store.close()


def cost(work: Callable[[Opened], object], opened: Opened, counted: Steps) -> tuple[int, list[str]]:
    before = counted.count
    with watching(opened.store.path) as made:
        work(opened)
    return counted.count - before, made.made


@pytest.mark.parametrize("work", WORKS, ids=NAMES_OF_WORKS)
def test_ten_times_the_blocks_are_the_same_work(
    opened: dict[int, Opened], counted: Steps, work: Callable[[Opened], object]
) -> None:
    few, made_by_few = cost(work, opened[SMALL], counted)
    many, made = cost(work, opened[LARGE], counted)
    assert few > 0
    assert many <= 1.2 * few + 50, f"{few} steps with {SMALL} blocks, {many} with {LARGE}"
    assert len(made) <= len(made_by_few) + 5
    # The folder itself has at most 256 entries, which are looked at for links when a store is opened.
    assert not [call for call in made if re.match(r"(scandir|listdir) blocks/", call)]


def test_a_walk_would_be_seen(opened: dict[int, Opened], counted: Steps) -> None:
    def walk(opened: Opened) -> None:
        opened.store.index.query("SELECT COUNT(*) FROM blocks WHERE bytes > 5")

    few, _ = cost(walk, opened[SMALL], counted)
    many, _ = cost(walk, opened[LARGE], counted)
    assert many > 5 * few


def test_blocks_that_were_used_at_one_time_are_planned_in_one_pass(
    opened: dict[int, Opened], counted: Steps
) -> None:
    steps = {}
    store = opened[LARGE].store
    with store.index.transaction() as db:
        db.execute("UPDATE blocks SET used = 5")
    for blocks in (300, 1500):
        size = store.index.query("SELECT MAX(bytes) FROM blocks")[0][0]
        before = counted.count
        assert len(store.space.eviction.plan(blocks * size).blocks) >= blocks
        steps[blocks] = counted.count - before
    assert steps[1500] < 6 * steps[300]


def test_a_rebuild_leaves_no_long_log(
    built: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOG_BYTES", 2**16)
    with Store(built[LARGE]) as store:
        log = Path(f"{store.place.index}-wal")
        store.place.index.unlink()
        assert store.index.is_reachable(NAMES[0])
        assert log.stat().st_size > 2**20  # it was written through the log
        store.index.query("PRAGMA wal_checkpoint")  # which a larger one brings about itself
        for number in range(2):
            store.index.count_request(NAMES[number], 64, 1)
            store.index.write_notes()
        assert log.stat().st_size <= 2**16


def test_what_was_built_is_a_store_like_any_other(built: dict[int, Path]) -> None:
    with Store(built[SMALL]) as store:
        report = verify_store(store)
    assert (report.bad, report.unreachable) == ([], [])
    assert report.checked >= SMALL
