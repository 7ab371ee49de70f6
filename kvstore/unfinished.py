"""Files in tmp/: of running writers, and what killed ones left.

A file of a dead writer goes after a grace time and is counted until then. Age alone does not prove
that a writer is dead (it may be stopped): the owner in the file's name must be gone as well.

A block's file without its row is unfinished too: between rename and row of a put, and between row
and unlink of an eviction. It is noted under the block's name, so that whoever comes next after a kill
deletes it: without the row nothing protects the block before it.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from kvsnap.formats.errors import StoreError
from kvsnap.kvstore import files
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.locks import Owner
from kvsnap.kvstore.place import Place

GRACE_SECONDS = 3600
"""Long enough that somebody who looks after a crash still finds what was being written."""
OURS = re.compile(r"([0-9a-f]{16})(\.[0-9a-f]{16}\.part|\.owner)")
"""Names in tmp/ that are kvsnap's; whatever else lies there is left alone."""
_BLOCK = re.compile(r"[0-9a-f]{64}")


def unfinished_name(owner: str) -> str:
    """A new name in tmp/. It has nothing of the final name in it: a name near the file system's
    limit must still be storable, and two writers of one name must not meet."""
    return f"{owner}.{secrets.token_hex(8)}.part"


class Unfinished:
    """The files in tmp/ of one store, and their reservations."""

    def __init__(self, place: Place, index: Index, owner: Owner) -> None:
        self.place, self.index, self.owner = place, index, owner
        self._cleaned = False
        self.open: set[str] = set()
        """What this store is writing: names in tmp/, and blocks."""

    def clean_once(self) -> None:
        """Once a store: whoever writes first tidies up after those who died."""
        if not self._cleaned:
            self._cleaned = True
            self.recount()
            self.clean(list(self.over()))

    def over(self) -> Iterator[tuple[Path, int]]:
        """Files of dead writers past the grace time, and blocks without a row, with their sizes."""
        for entry, owner, size in self._rows():
            if size and _BLOCK.fullmatch(entry) and not self.owner.is_alive(owner):
                yield self.place.block(bytes.fromhex(entry)), size
        yield from self.dead(older_than=GRACE_SECONDS)

    def dead(self, older_than: float = 0.0) -> Iterator[tuple[Path, int]]:
        """Files of dead writers, with their sizes."""
        for path, size, changed in files.sizes(self.place.temporary):
            ours = OURS.fullmatch(path.name)
            old = time.time() - changed >= older_than
            if ours and old and not self.owner.is_alive(ours[1]):
                yield path, size

    def clean(self, paths: list[tuple[Path, int]]) -> int:
        """Delete them with their reservations; returns the bytes freed. Errors never matter."""
        freed = 0
        for path, size in paths:
            with contextlib.suppress(OSError, StoreError):
                if path.parent == self.place.temporary:
                    path.unlink()
                    freed += size
                    continue
                with self.index.transaction() as db:
                    gone = self.finish(db, bytes.fromhex(path.name.partition(".")[0]))
                freed += size if gone else 0
        self.recount()
        return freed

    def note_block(self, db: sqlite3.Connection, name: bytes, size: int) -> None:
        """Inside a transaction: a block's file may be without a row from now on. `size` counts."""
        row = (name.hex(), self.owner.id, size)
        db.execute("INSERT OR REPLACE INTO unfinished VALUES (?, ?, ?)", row)

    def is_going(self, db: sqlite3.Connection, name: bytes) -> bool:
        """Whether somebody is about to delete the file of a block without a row."""
        sql = "SELECT 1 FROM unfinished WHERE path = ?"
        return db.execute(sql, (name.hex(),)).fetchone() is not None

    def finish(self, db: sqlite3.Connection, name: bytes) -> bool:
        """Inside a transaction: delete a block's file, unless it has a row (again). Whether it went;
        one that is in use, or may not be deleted, stays counted."""
        path = self.place.block(name)
        again = db.execute("SELECT 1 FROM blocks WHERE name = ?", (name,)).fetchone()
        if again is None and not _unlink(path) and files.file_size(path) is not None:
            return False
        db.execute("DELETE FROM unfinished WHERE path = ?", (name.hex(),))
        return again is None

    def recount(self) -> None:
        """Make the reservations those of the files that are there and of live writers."""
        with contextlib.suppress(StoreError):
            if any(self._wrong()):
                # Once more inside: a file that is published between listing and asking would stay
                # reserved for as long as its writer lives.
                with self.index.transaction() as db:
                    gone, new = self._wrong()
                    db.executemany("DELETE FROM unfinished WHERE path = ?", [(p,) for p in gone])
                    db.executemany("INSERT OR REPLACE INTO unfinished VALUES (?, ?, ?)", new)

    def _wrong(self) -> tuple[list[str], list[tuple[str, str, int]]]:
        """(reservations for nothing, those that are missing)."""
        there = _sizes(self.place)
        gone, known = list[str](), set[str]()
        new = list[tuple[str, str, int]]()
        for path, owner, size in self._rows():
            known.add(path)
            if there.get(path) == size or self._is_written(path, owner):
                continue
            left = there.get(path, self._left(path))
            if left is None:
                gone.append(path)
            elif left != size:
                new.append((path, owner, left))
        new += [(n, n.split(".")[0], size) for n, size in there.items() if n not in known]
        return gone, new

    def _is_written(self, path: str, owner: str) -> bool:
        """Whether a running writer is at it. Of ourselves we know: a reservation that could not be
        given back, on a full disk, must not count as long as we live."""
        return path in self.open if owner == self.owner.known else self.owner.is_alive(owner)

    def _left(self, path: str) -> int | None:
        """The length of a noted block's file where it has no row; None where nothing is there."""
        if not _BLOCK.fullmatch(path):
            return None
        name = bytes.fromhex(path)
        has_row = self.index.query("SELECT 1 FROM blocks WHERE name = ?", [name])
        return None if has_row else files.file_size(self.place.block(name))

    def _rows(self) -> list[tuple[str, str, int]]:
        return self.index.query("SELECT path, owner, bytes FROM unfinished")


def fill_unfinished(place: Place, db: sqlite3.Connection) -> None:
    """Count what is in tmp/ while the index is built anew."""
    rows = [(name, name.split(".")[0], size) for name, size in _sizes(place).items()]
    db.executemany("INSERT OR IGNORE INTO unfinished VALUES (?, ?, ?)", rows)


def _sizes(place: Place) -> dict[str, int]:
    """Name → length of what is ours in tmp/; locks have none."""
    found = files.sizes(place.temporary)
    return {path.name: size for path, size, _ in found if size and OURS.fullmatch(path.name)}


def _unlink(path: Path) -> bool:
    """Whether the file is gone now. One that is in use, or may not be deleted, is left for later."""
    try:
        path.unlink()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
