"""Pins and leases: a block that one stands on is not evicted, and so is none before it.

A pin is a person's, and a file (pins.py); its row here follows it. A lease is a running call's: it
ends with the call, with its process, or, where neither can be told, an hour after its last use.
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvsnap.formats.errors import StoreError
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.locks import Owner

LEASE_SECONDS = 3600.0
"""Longer than any single call between two blocks; only for owners whose death cannot be seen."""
FOREVER = float("inf")


class Lease:
    """One call's hold on a chain: it stands on the deepest block that the call needs."""

    def __init__(self, index: Index, owner: Owner) -> None:
        self._index, self._owner = index, owner
        self._id: int | None = None
        self._key = ""
        self._start = -1
        self.name = b""
        """The block that it stands on."""

    def keep(self, name: bytes, *, wait: bool = True) -> bool:
        """Stand on a stored block from now on; False where it is not there (any more).

        Without `wait` a store that is busy or cannot be written is passed over: the caller then
        reads without a lease, and a block that goes meanwhile is a miss.
        """
        try:
            with self._index.transaction(wait=wait) as db:
                return self.move(db, name)
        except StoreError:
            if wait:
                raise
            return False

    def move(self, db: sqlite3.Connection, name: bytes, *, deeper: bool = False) -> bool:
        """The same inside the caller's transaction. With `deeper` it never moves towards the front:
        what stands behind a block that is mended in the middle must stay, too."""
        found = db.execute("SELECT id, start FROM blocks WHERE name = ?", (name,)).fetchone()
        if found is None:
            return False
        if deeper and self._id is not None and found[1] < self._start:
            return True
        self.name, self._start = name, found[1]
        until, key = time.time() + LEASE_SECONDS, self._owner.id
        if self._id is not None and key == self._key:
            moved = db.execute(
                "UPDATE holds SET block = ?, until = ? WHERE id = ? AND owner = ?",
                (found[0], until, self._id, key),
            )
            if moved.rowcount:
                return True  # else the index was built anew under us
        self._key = key
        # Random: a new index counts from 1 again, and must not take one lease for another.
        self._id = secrets.randbits(62)
        row = (self._id, "lease", key, until, found[0])
        db.execute("INSERT INTO holds(id, kind, owner, until, block) VALUES (?, ?, ?, ?, ?)", row)
        return True

    def end(self, *, wait: bool = False) -> None:
        """Let go. What cannot be written now ends with the owner."""
        self.name, self._start = b"", -1
        if self._id is None:
            return
        row, self._id = (self._id, self._key), None
        sql = "DELETE FROM holds WHERE id = ? AND owner = ?"
        self._index.note(lambda db: db.execute(sql, row).close())
        self._index.write_notes(wait=wait)


class Holds:
    """The rows of pins and leases of one store."""

    def __init__(self, index: Index, owner: Owner) -> None:
        self.index, self.owner = index, owner

    @contextlib.contextmanager
    def lease(self) -> Iterator[Lease]:
        """A lease that ends with the block of code, however that ends."""
        lease = Lease(self.index, self.owner)
        try:
            yield lease
        finally:
            lease.end()

    def end_dead(self, db: sqlite3.Connection) -> None:
        """Inside a transaction: remove leases of dead owners and whatever has expired."""
        db.execute("DELETE FROM holds WHERE until < ?", (time.time(),))
        for (owner,) in db.execute("SELECT DISTINCT owner FROM holds WHERE kind = 'lease'"):
            if not self.owner.is_alive(owner):
                db.execute("DELETE FROM holds WHERE kind = 'lease' AND owner = ?", (owner,))


def pin_key(path: Path) -> str:
    """What names a pin in the index: the last two parts of its path, and of its session's."""
    return f"{path.parent.name}/{path.name}"


def set_pin(db: sqlite3.Connection, key: str, until: float, block: bytes | None) -> None:
    """Inside a transaction: the pin `key` stands on `block` (None: on nothing yet)."""
    end_pin(db, key)
    db.execute(
        "INSERT INTO holds(kind, owner, until, block)"
        " VALUES ('pin', ?, ?, (SELECT id FROM blocks WHERE name = ?))",
        (key, until or FOREVER, block),
    )


def follow_pin(db: sqlite3.Connection, key: str, chain: Sequence[bytes]) -> None:
    """Inside a transaction: a session that is pinned was saved with this chain. In a full store its
    end may be missing: the pin then stands on the deepest block that is there."""
    pinned = "SELECT id FROM holds WHERE kind = 'pin' AND owner = ?"
    if not db.execute(pinned, (key,)).fetchall():
        return
    sql = "SELECT id FROM blocks WHERE name = ? AND reachable = 1"
    depth = gallop(lambda number: bool(db.execute(sql, (chain[number],)).fetchall()), len(chain))
    block = db.execute(sql, (chain[depth - 1],)).fetchone()[0] if depth else None
    db.execute("UPDATE holds SET block = ? WHERE kind = 'pin' AND owner = ?", (block, key))


def rename_pin(db: sqlite3.Connection, old: str, new: str) -> None:
    """Inside a transaction: a session's file, and so its pin's, gets another name."""
    if db.execute("SELECT 1 FROM holds WHERE kind = 'pin' AND owner = ?", (old,)).fetchall():
        end_pin(db, new)  # of a killed one's try
        db.execute("UPDATE holds SET owner = ? WHERE kind = 'pin' AND owner = ?", (new, old))


def end_pin(db: sqlite3.Connection, key: str) -> None:
    db.execute("DELETE FROM holds WHERE kind = 'pin' AND owner = ?", (key,))
