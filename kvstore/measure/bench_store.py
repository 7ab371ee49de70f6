"""Build a synthetic store and measure what its size costs: `kvsnap bench store`."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore import files
from kvsnap.kvstore.measure.synthetic import BLOCK_SIZE, Built, build

OPENS = 5
HOW_BUILT = (
    "block and session files are packed by the code that packs real ones and written under their"
    " final names, without sync; the index is made from all of them at once, by a rebuild"
)
Step = Callable[[str, int, int], None]
"""Called with what is done now (build, rebuild), how much of it, and how much it is."""


@dataclass(frozen=True)
class Timing:
    """Of `count` times, in seconds."""

    median: float
    p95: float
    count: int


@dataclass(frozen=True, kw_only=True)
class StoreBench:
    """`timings`: open, look_up_* (hashing the names and search), search_*, put, put_full (evicts),
    evict, stats, ls, plan (of 1,000 evictions), gc (a dry run). Peaks are of whole processes; None where the system does not say."""

    built: Built
    build_seconds: float
    rebuild_seconds: float
    rebuild_peak_bytes: int | None
    index_bytes: int
    timings: dict[str, Timing]
    peak_bytes: int | None

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt that is looked up."""
        return self.built.long_chain * BLOCK_SIZE


def bench_store(
    folder: Path, blocks: int, step: Step = lambda what, done, total: None
) -> StoreBench:
    """Fill an empty folder with a store of so many blocks and use it. Raises as `build` does."""
    started = time.perf_counter()
    built = build(folder, blocks, lambda done, total: step("build", done, total))
    build_seconds = time.perf_counter() - started
    rebuilt = _fresh("rebuild", folder, blocks, lambda done, total: step("rebuild", done, total))
    opened = [_fresh("open", folder, blocks)["seconds"] for _ in range(OPENS)]
    used = _fresh("use", folder, blocks)
    return StoreBench(
        built=built,
        build_seconds=build_seconds,
        rebuild_seconds=rebuilt["seconds"],
        rebuild_peak_bytes=rebuilt["peak_bytes"],
        index_bytes=rebuilt["index_bytes"],
        timings={
            what: timing(seconds) for what, seconds in [("open", opened), *used["seconds"].items()]
        },
        peak_bytes=used["peak_bytes"],
    )


def timing(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    return Timing(statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))], len(ordered))


@contextmanager
def temporary_folder(store: Path) -> Iterator[Path]:
    """A folder beside a store, so on the same disk, which goes with all that is in it."""
    beside = next(path for path in store.parents if path.is_dir())
    with files.store_errors(beside / "x"):
        folder = tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir=beside)
    with folder as name:
        yield Path(name)


def _fresh(
    what: str,
    folder: Path,
    blocks: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run one of the measurements of store_timings.py in a process of its own."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvsnap.kvstore.measure.store_timings",
        what,
        str(folder),
        str(blocks),
    ]
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                last = line
                done = line.split()
                if len(done) == 2 and done[0].isdigit() and done[1].isdigit():
                    progress(int(done[0]), int(done[1]))
        except BaseException:
            process.kill()
            raise
        trouble = process.stderr.read().strip().splitlines()
    if process.returncode:
        why = trouble[-1] if trouble else f"exit code {process.returncode}"
        raise KvsnapError(f"measuring ({what}) failed: {why}", "please report it")
    result: dict[str, Any] = json.loads(last)
    return result
