"""What is wrong with a store or an engine, and what to do about it. Nothing is changed."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.interchange.llamacpp import SUPPORTED_VERSIONS
from kvsnap.kvstore.place import SETTINGS
from kvsnap.kvstore.rebuild import block_paths
from kvsnap.kvstore.store import Store

LOW_SPACE = 1_000_000_000
GRACE_SECONDS = 3600
"""Unfinished files younger than this may belong to a running save."""
_OURS = {
    SETTINGS,
    "blocks",
    "states",
    "sessions",
    "pins",
    "tmp",
    "quarantine",
    "index.sqlite3",
    "index.sqlite3-wal",
    "index.sqlite3-shm",
}


@dataclass(frozen=True)
class Finding:
    """`level` is ok, note or problem; `advice` says what to do about the latter two."""

    level: str
    what: str
    advice: str = ""


def examine(path: str | Path | None) -> Iterator[Finding]:
    """All findings on the store at `path` and on the engines that are installed."""
    try:
        store = Store(path)
    except KvsnapError as error:
        yield Finding("problem", error.what, error.hint)
    else:
        with store:
            yield from _store(store)
    yield from _llama()


def _store(store: Store) -> Iterator[Finding]:
    place = store.place
    if not place.root.exists():
        yield Finding("ok", f"store {place.root}: nothing there yet; the first save makes it")
    else:
        yield Finding("ok", f"store {place.root}, blocks of {store.block_size} tokens")
    if store.problem:
        yield Finding("problem", store.problem, "the next save writes it anew")
    if not place.writable():
        yield Finding("problem", f"{place.root} cannot be written", "check its owner and mode")
    existing = next(p for p in (place.root, *place.root.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < LOW_SPACE:
        yield Finding("problem", f"{free / 1e9:.1f} GB free on the store's disk", "free some space")
    if place.root.exists():
        yield from _index(store)
        yield from _leftovers(store)


def _index(store: Store) -> Iterator[Finding]:
    try:
        rows = store.index.query("SELECT COUNT(*) FROM blocks WHERE lost IS NULL")[0][0]
        lost = store.index.query("SELECT COUNT(*) FROM blocks WHERE lost IS NOT NULL")[0][0]
        unreachable = store.index.query(
            "SELECT COUNT(*) FROM blocks WHERE lost IS NULL AND reachable = 0"
        )[0][0]
    except (KvsnapError, sqlite3.Error) as error:
        yield Finding("problem", f"the index cannot be used: {error}", "delete index.sqlite3*")
        return
    count = sum(1 for _ in block_paths(store.place))
    yield Finding("ok", f"{count} block files, {rows} in the index")
    if count != rows:
        yield Finding(
            "note",
            f"{abs(count - rows)} block files and rows do not match",
            "delete index.sqlite3* (it is built anew), then run kvsnap verify",
        )
    if lost:
        yield Finding("note", f"{lost} blocks were damaged or missing", "kvsnap verify lists them")
    if unreachable:
        yield Finding(
            "note",
            f"{unreachable} blocks wait for one before them",
            "saving their prompt again makes them usable",
        )


def _leftovers(store: Store) -> Iterator[Finding]:
    place = store.place
    aside = list(place.quarantine.glob("*.reason"))
    if aside:
        yield Finding(
            "note", f"{len(aside)} damaged files in {place.quarantine}", "look, then delete them"
        )
    old = [p for p in place.temporary.glob("*") if time.time() - _mtime(p) > GRACE_SECONDS]
    if old:
        yield Finding(
            "note", f"{len(old)} unfinished files in {place.temporary}", "they may be deleted"
        )
    foreign = sorted(p.name for p in place.root.iterdir() if p.name not in _OURS)
    if foreign:
        names = ", ".join(foreign[:5]) + (" …" if len(foreign) > 5 else "")
        yield Finding("note", f"not kvsnap's, left alone: {names}", "move it elsewhere")


def _llama() -> Iterator[Finding]:
    try:
        import llama_cpp
    except ImportError:
        advice = "pip install 'kvsnap[llama]'"
        yield Finding("note", "engine llama.cpp: llama-cpp-python is not installed", advice)
        return
    except OSError as error:
        yield Finding("problem", f"engine llama.cpp cannot be loaded: {error}", "reinstall it")
        return
    version = getattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", None)
    name = f"engine llama.cpp: llama-cpp-python {llama_cpp.__version__}, state version {version}"
    if version in SUPPORTED_VERSIONS:
        yield Finding("ok", name)
    else:
        known = ", ".join(map(str, SUPPORTED_VERSIONS))
        yield Finding("problem", f"{name}; kvsnap knows {known}", "use another version of either")


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()
