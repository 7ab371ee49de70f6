"""What a synthetic store costs in a fresh process. bench_store.py runs this, so that neither the
building nor another measurement is in its memory, and nothing is open or warm that a command would
not find so:

    python -m kvsnap.kvstore.measure.store_timings open|rebuild|use FOLDER BLOCKS

Prints lines of progress, `DONE TOTAL`, and one of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.names import TokenIds, block_name, chain_names
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.match import longest_prefix
from kvsnap.kvstore.measure import synthetic
from kvsnap.kvstore.measure.synthetic import BLOCK_SIZE, ROOT
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

LOOK_UPS = 50
CHANGES = 300
"""Of puts and evictions; a tenth of the blocks in a small store."""
LISTINGS = 10
TIDYINGS = 3
PLANNED = 1000
"""Blocks that the timed plan evicts."""
_UNTIMED = 10
"""Changes that a process makes its folders and statements ready with."""
Seconds = dict[str, list[float]]


def open_store(folder: Path, blocks: int) -> dict[str, Any]:
    started = time.perf_counter()
    with Store(folder) as store:
        store.index.query("SELECT 1 FROM blocks WHERE name = ?", [bytes(32)])
        return {"seconds": time.perf_counter() - started}


def rebuild(folder: Path, blocks: int) -> dict[str, Any]:
    """From deleting the index to the first answer; then the size of what was made."""
    with Store(folder) as store:
        index = store.place.index
        for suffix in ("", "-wal", "-shm"):
            Path(f"{index}{suffix}").unlink(missing_ok=True)
        store.progress = lambda done, total: print(done, total, flush=True)
        started = time.perf_counter()
        found = store.index.query("SELECT SUM(blocks) FROM totals")[0][0]
        seconds = time.perf_counter() - started
    _expect(found, blocks, "blocks in the index")
    return {"seconds": seconds, "index_bytes": index.stat().st_size}


def use(folder: Path, blocks: int) -> dict[str, Any]:
    """Look-ups, changes and listings; series of seconds."""
    seconds: Seconds = {}
    with _store(folder) as store:
        _look_up(store, blocks, seconds)
        changes = min(CHANGES, max(1, blocks // 10))
        random = Generator(PCG64(2))
        _put(store, random, _UNTIMED)
        seconds["put"] = _put(store, random, changes)
        seconds["evict"] = _evict(store, changes)
        seconds["stats"] = [_timed(lambda: stats(store)) for _ in range(LISTINGS)]
        seconds["ls"] = [_timed(lambda: list(store.listing)) for _ in range(LISTINGS)]
        used = store.space.used()
    with _store(folder, used) as full:
        seconds["put_full"] = _put(full, random, changes)
    planned = min(PLANNED, max(1, blocks // 10))
    with _store(folder, used - planned * (used // blocks)) as over:
        need = over.space.missing()
        seconds["plan"] = [_timed(lambda: over.space.eviction.plan(need)) for _ in range(LISTINGS)]
        seconds["gc"] = [_timed(lambda: gc(over, dry_run=True)) for _ in range(TIDYINGS)]
    return {"seconds": seconds}


def _store(folder: Path, capacity: int | str = "unlimited") -> Store:
    return Store(folder, capacity=capacity, min_free="0")


def _look_up(store: Store, blocks: int, seconds: Seconds) -> None:
    """A prompt of the longest chain's length, of which all, half or nothing is stored."""
    count = synthetic.long_chain(blocks)
    known = synthetic.long_ids(count)
    other = synthetic.some_ids(Generator(PCG64(3)), len(known))
    half = count // 2
    mixed = np.concatenate([known[: half * BLOCK_SIZE], other[half * BLOCK_SIZE :]])
    for what, ids, there in (("all", known, count), ("half", mixed, half), ("none", other, 0)):
        whole, search = list[float](), list[float]()
        _one_look_up(store, ids, there)
        for _ in range(LOOK_UPS):
            named, found = _one_look_up(store, ids, there)
            whole.append(named + found)
            search.append(found)
        seconds[f"look_up_{what}"], seconds[f"search_{what}"] = whole, search


def _one_look_up(store: Store, ids: TokenIds, there: int) -> tuple[float, float]:
    """Seconds to hash the names of a prompt, and to find what is stored of it."""
    started = time.perf_counter()
    names = chain_names(ROOT.key, ids, BLOCK_SIZE)
    named = time.perf_counter()
    match = longest_prefix(store.blocks, ROOT, names, ids, BLOCK_SIZE, len(ids))
    done = time.perf_counter()
    _expect(match.tokens // BLOCK_SIZE, there, "stored blocks of the prompt")
    return named - started, done - named


def _put(store: Store, random: Generator, count: int) -> list[float]:
    """One new block after each of some stored ones, as a save does it while it holds a lease."""
    seconds = list[float]()
    rows = synthetic.rows_of(BLOCK_SIZE)
    last = store.index.query("SELECT MAX(id) FROM blocks")[0][0]
    with store.holds.lease() as lease:
        while len(seconds) < count:
            number = int(random.integers(1, last + 1))
            sql = "SELECT name, start FROM blocks WHERE id = ? AND reachable = 1"
            for name, start in store.index.query(sql, [number]):
                ids = synthetic.some_ids(random, BLOCK_SIZE)
                own = block_name(ROOT.key, name, ids)
                wanted = Wanted(own, name, start + BLOCK_SIZE, ids)
                lease.keep(name)
                started = time.perf_counter()
                written = store.blocks.put(
                    ROOT, wanted, synthetic.CODEC, synthetic.LAYOUT, rows, lease
                )
                seconds.append(time.perf_counter() - started)
                _expect(written > 0, True, "a block written")
    return seconds


def _evict(store: Store, count: int) -> list[float]:
    """Room for one byte: the least recently used leaf goes."""
    seconds = list[float]()
    for _ in range(count):
        started = time.perf_counter()
        freed = store.space.eviction.make_room(1)
        seconds.append(time.perf_counter() - started)
        _expect(freed, True, "a block evicted")
    return seconds


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _expect(found: object, wanted: object, what: str) -> None:
    """A measurement of the wrong thing must not pass for one."""
    if found != wanted:
        raise KvsnapError(f"{what}: {found} where there should be {wanted}", "please report it")


def peak_bytes() -> int | None:
    """The most memory that this process had; None where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
        # Not getrusage: on Linux its figure begins at that of the process that started this one.
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


WORKS = {"open": open_store, "rebuild": rebuild, "use": use}

if __name__ == "__main__":
    what, where, number = sys.argv[1:]
    found = WORKS[what](Path(where), int(number))
    print(json.dumps({**found, "peak_bytes": peak_bytes()}))
