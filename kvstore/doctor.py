"""What is wrong with a store or an engine, and what to do about it. Nothing that is stored is changed."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsnap.engines.installed import installed
from kvsnap.formats.errors import KvsnapError, Unsupported
from kvsnap.formats.pin import SESSION
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore.budget import disk_free
from kvsnap.kvstore.holds import pin_key
from kvsnap.kvstore.other_version import what_it_holds
from kvsnap.kvstore.pins import pin_paths
from kvsnap.kvstore.place import SETTINGS, Place, default_path
from kvsnap.kvstore.rebuild import block_names
from kvsnap.kvstore.roots_apart import roots_apart
from kvsnap.kvstore.session_file import read_pin
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.unfinished import OURS

_OURS = {
    SETTINGS,
    f"{SETTINGS}.damaged",
    "blocks",
    "sessions",
    "pins",
    "tmp",
    "quarantine",
    "calibrations",
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


def examine(
    path: str | Path | None, capacity: str | int | None = None, engine: str = "llama.cpp"
) -> Iterator[Finding]:
    """All findings on the store at `path`, and on one engine: whether what is installed here fits."""
    try:
        store = Store(path, capacity=capacity)
    except KvsnapError as error:
        yield Finding("problem", error.what, error.hint)
        if isinstance(error, Unsupported):
            place = Place(Path(path).expanduser() if path else default_path())
            yield Finding("note", *what_it_holds(place))
    else:
        with store:
            yield from _store(store)
    for level, what, advice in installed(engine):
        yield Finding(level, what, advice)


def _store(store: Store) -> Iterator[Finding]:
    place = store.place
    if not place.root.exists():
        yield Finding("ok", f"store {place.root}: nothing there yet; the first save makes it")
    else:
        yield Finding("ok", f"store {place.root}, blocks of {store.block_size} tokens")
    if store.problem:
        yield Finding(
            "problem", store.problem, "mend it; the next save moves it to kvsnap.json.damaged"
        )
    if place.damaged_settings.exists():
        what = f"{place.damaged_settings} could not be read, and was replaced"
        yield Finding("note", what, "copy your settings from it to kvsnap.json, then delete it")
    for problem in store.break_even.problems:
        yield Finding("note", problem, "kvsnap bench crossover measures anew")
    if not place.writable():
        yield Finding("problem", f"{place.root} cannot be written", "check its owner and mode")
    yield from _room(store)
    if place.root.exists():
        yield from _index(store)
        yield from _apart(store)
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
    count = sum(len(block_names(store.place, byte)) for byte in range(256))
    yield Finding("ok", f"{count} block files, {rows} in the index")
    if count != rows:
        yield Finding(
            "note",
            f"{abs(count - rows)} block files and rows do not match",
            "kvsnap gc brings them together, kvsnap verify says more",
        )
    if lost:
        yield Finding("note", f"{lost} blocks were damaged or missing", "kvsnap verify lists them")
    if unreachable:
        yield Finding(
            "note",
            f"{unreachable} blocks wait for one before them",
            "saving their prompt again makes them usable",
        )


def _apart(store: Store) -> Iterator[Finding]:
    """Why blocks of one model do not serve another engine, or a server that was started otherwise."""
    with contextlib.suppress(KvsnapError, sqlite3.Error):  # the index's own finding tells of it
        for apart in roots_apart(store):
            yield Finding("note", str(apart), "docs/serving.md says what must match")


def _room(store: Store) -> Iterator[Finding]:
    """What the store takes of what it may, and what the disk has left."""
    free, budget = disk_free(store.place.root), store.budget
    if free < budget.min_free:
        yield Finding(
            "problem",
            f"{_size(free)} free on the store's disk, {_size(budget.min_free)} are kept",
            "free some space; saving evicts blocks until then",
        )
    try:
        used = store.space.used()
    except (KvsnapError, sqlite3.Error):
        return  # the index's own finding tells of it
    if budget.capacity is None:
        yield Finding("ok", f"{_size(used)} taken, no limit (from {budget.source})")
        return
    share = f"{_size(used)} of {_size(budget.capacity)} taken (limit from {budget.source})"
    if used > budget.capacity:
        yield Finding(
            "note", share, "kvsnap gc evicts what it may; session files and pinned blocks stay"
        )
    else:
        yield Finding("ok", share)


def _leftovers(store: Store) -> Iterator[Finding]:
    place = store.place
    aside = list(place.quarantine.glob("*.reason"))
    if aside:
        yield Finding(
            "note", f"{len(aside)} damaged files in {place.quarantine}", "look, then delete them"
        )
    dead = list(store.space.unfinished.dead())
    if dead:
        taken = _size(sum(size for _, size in dead))
        what = f"{len(dead)} files of killed writers in {place.temporary}, {taken}"
        yield Finding("note", what, "kvsnap gc deletes them when they are an hour old")
    for path in pin_paths(place):
        try:
            record = read_pin(path)
        except (KvsnapError, OSError) as error:
            yield Finding("note", f"pin {path} is damaged and pins nothing: {error}", "pin again")
            continue
        if record.what == SESSION and not (place.sessions / pin_key(path)).exists():
            yield Finding("note", f"a pin without its session: {path}", "delete the file")
    foreign = sorted(_foreign(place))
    if foreign:
        names = ", ".join(foreign[:5]) + (" …" if len(foreign) > 5 else "")
        count = f"{len(foreign)} things are" if len(foreign) > 1 else "one thing is"
        yield Finding(
            "note",
            f"{count} not kvsnap's, left alone and not counted: {names}",
            "move it elsewhere, where it is not wanted",
        )


_DIGEST = rf"[0-9a-f]{{64}}{SUFFIX}"


def _foreign(place: Place) -> Iterator[str]:
    """What stands in the store's folders and is not ours, as paths from the store's root."""
    yield from (p.name for p in _entries(place.root) if p.name not in _OURS)
    named = (p for p in _entries(place.calibrations) if not re.fullmatch(_DIGEST, p.name))
    yield from (str(p.relative_to(place.root)) for p in named)
    for pattern, folder in [
        (r"[0-9a-f]{2}", place.blocks),
        (r"[0-9a-f]{64}|default", place.sessions),
        (r"[0-9a-f]{64}|default|blocks", place.pins),
        (OURS.pattern, place.temporary),
    ]:
        for entry in _entries(folder):
            if not re.fullmatch(pattern, entry.name):
                yield str(entry.relative_to(place.root))
            elif folder is not place.temporary and not entry.is_symlink():
                ours = _DIGEST if folder is place.blocks else rf".*{SUFFIX}"
                inside = (p for p in _entries(entry) if not re.fullmatch(ours, p.name))
                yield from (str(p.relative_to(place.root)) for p in inside)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 10**9 else f"{count / 1e6:.1f} MB"


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
