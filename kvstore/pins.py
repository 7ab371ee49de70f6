"""Pins on disk: sessions and blocks that a person keeps from eviction, for ever or for a time."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from kvsnap.formats.errors import KvsnapError, NotFound
from kvsnap.formats.pin import BLOCK, SESSION, PinRecord, pack_pin
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore import files
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.holds import end_pin, pin_key, set_pin
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.session_file import read_pin, stands_on
from kvsnap.kvstore.sessions import Sessions
from kvsnap.kvstore.space import Space


class Pins:
    """The pins of one store."""

    def __init__(self, place: Place, index: Index, sessions: Sessions, space: Space) -> None:
        self.place, self.index, self.sessions, self.space = place, index, sessions, space

    def pin_session(self, tenant_id: str, name: str, seconds: float | None = None) -> None:
        """Keep the stored blocks of a session, also those of its later saves. Raises `NotFound`."""
        path = self.sessions.require(tenant_id, name)
        stem = path.name.removesuffix(SUFFIX)  # a sealed session's name stands nowhere in the clear
        record = PinRecord(SESSION, tenant_id, stem, _until(seconds))
        self._write(self.place.pin(path), record)

    def pin_block(self, name: bytes, seconds: float | None = None) -> None:
        """Keep a block and all before it. Raises `NotFound`."""
        if not self.index.is_reachable(name):
            raise _not_stored(name)
        self._write(
            self.place.pin_of_block(name), PinRecord(BLOCK, "", name.hex(), _until(seconds))
        )

    def require(self, tenant_id: str, what: str | bytes) -> None:
        """Raises `NotFound` unless a session (its name) or a block (its name) is pinned."""
        if isinstance(what, bytes):
            path, text = self.place.pin_of_block(what), f"block {what.hex()[:12]}"
        else:
            path = self.place.pin(self.sessions.path(tenant_id, what))
            text = f"session {what!r}"
        if not files.stands(path) and pin_key(path) not in self._rows():
            raise NotFound(f"{text} is not pinned", "kvsnap ls and kvsnap show --tree say what is")

    def unpin_session(self, tenant_id: str, name: str) -> None:
        """Let a session's blocks go when room is needed. Raises `NotFound` where it is not pinned."""
        self._remove(self.place.pin(self.sessions.path(tenant_id, name)), f"session {name!r}")

    def unpin_block(self, name: bytes) -> None:
        self._remove(self.place.pin_of_block(name), f"block {name.hex()[:12]}")

    def _write(self, path: Path, record: PinRecord) -> None:
        with self.space.holds.lease() as lease:
            # Room for the pin's own file must not be made by letting go of what it is for.
            keys = self.sessions.keys
            block = _deepest(self.place, path, record, self.index.is_reachable, keys)
            if block is not None and not lease.keep(block) and record.what == BLOCK:
                raise _not_stored(block)
            with self.space.write(pack_pin(record)) as room:
                files.make_dir(path.parent)
                files.sync_all([room.path])
                with self.index.transaction() as db:
                    block = _deepest(self.place, path, record, self.index.is_reachable, keys)
                    set_pin(db, pin_key(path), record.until, block)
                    room.publish(db, path)
        files.sync_all([path.parent, path.parent.parent, self.place.root])

    def _remove(self, path: Path, what: str) -> None:
        with self.index.transaction() as db, files.store_errors(path):
            there = files.stands(path)
            if not there and pin_key(path) not in self._rows():
                raise NotFound(f"{what} is not pinned", "kvsnap ls shows what is")
            path.unlink(missing_ok=True)
            end_pin(db, pin_key(path))
        if there:
            files.sync_all([path.parent])

    def compare(self, *, delete: bool) -> None:
        """Delete expired pins, if so asked, and make the rows those of the files: whoever is killed between the
        two leaves only one."""
        for path in pin_paths(self.place) if delete else ():
            with contextlib.suppress(KvsnapError, OSError):
                if 0 < read_pin(path).until < time.time():
                    path.unlink()
        if self._rows() == {pin_key(path) for path in pin_paths(self.place)}:
            return
        with self.index.transaction() as db:
            paths = {pin_key(path): path for path in pin_paths(self.place)}
            rows = self._rows()
            for key in rows - paths.keys():
                end_pin(db, key)
            for key in paths.keys() - rows:
                with contextlib.suppress(KvsnapError, OSError):
                    record = read_pin(paths[key])
                    if not record.until or record.until >= time.time():
                        found, keys = self.index.is_reachable, self.sessions.keys
                        block = _deepest(self.place, paths[key], record, found, keys)
                        set_pin(db, key, record.until, block)

    def _rows(self) -> set[str]:
        return {key for (key,) in self.index.query("SELECT owner FROM holds WHERE kind = 'pin'")}


def fill_pins(place: Place, db: sqlite3.Connection) -> None:
    """Set the pins that are in the folder while the index is built anew. Damaged ones are none;
    `doctor` tells of them."""

    def reachable(name: bytes) -> bool:
        sql = "SELECT 1 FROM blocks WHERE name = ? AND reachable = 1"
        return db.execute(sql, (name,)).fetchone() is not None

    for path in pin_paths(place):
        with contextlib.suppress(KvsnapError, OSError):
            record = read_pin(path)
            block = _deepest(place, path, record, reachable, Keyring())
            set_pin(db, pin_key(path), record.until, block)


def pin_paths(place: Place) -> list[Path]:
    with files.store_errors(place.pins):
        found = place.pins.glob(f"*/*{SUFFIX}")
        return sorted(path for path in found if path.name.isascii())  # as ours are


def _deepest(
    place: Place,
    path: Path,
    record: PinRecord,
    reachable: Callable[[bytes], bool],
    keys: Keyring,
) -> bytes | None:
    """The deepest stored block, or state checkpoint, that a pin keeps."""
    if record.what == BLOCK:
        return bytes.fromhex(record.name)
    try:
        path_down = stands_on(place.sessions / pin_key(path), keys)
    except (KvsnapError, OSError):
        return None
    depth = gallop(lambda number: reachable(path_down[number]), len(path_down))
    return path_down[depth - 1] if depth else None


def _not_stored(block: bytes) -> NotFound:
    return NotFound(f"block {block.hex()[:12]} is not in the store", "kvsnap show shows more")


def is_pinned(path: Path) -> bool:
    """Whether an intact pin stands there that has not expired."""
    try:
        until = read_pin(path).until
    except (KvsnapError, OSError):
        return False
    return not until or until > time.time()


def _until(seconds: float | None) -> int:
    return 0 if seconds is None else int(time.time() + seconds)
