"""The store's room: what it takes, what may still be written, and what goes to make room.

A writer reserves a file's bytes before it writes them, so that many writers together keep the
budget; the reservation counts until the file is published, or, where its writer died, until the
unfinished file is cleaned away.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.container import Packed
from kvsnap.formats.errors import StoreError, StoreFull, Vanished
from kvsnap.kvstore import files
from kvsnap.kvstore.budget import Budget, disk_free, log_room
from kvsnap.kvstore.eviction import Eviction
from kvsnap.kvstore.holds import Holds
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place, write_settings
from kvsnap.kvstore.unfinished import Unfinished, unfinished_name

TRIES = 8
"""Of making room against others who fill it again or use what was chosen to go."""


@dataclass
class Room:
    """A reserved place in tmp/ for one file; `block`: the name, where it is a block's."""

    path: Path
    block: bytes | None = None
    published: bool = False

    @property
    def names(self) -> set[str]:
        """What is noted of it while it is written."""
        return {self.path.name} | ({self.block.hex()} if self.block is not None else set())

    def publish(self, db: sqlite3.Connection, target: Path) -> None:
        """Inside a transaction, and last in it: rename the file to where it belongs. What fails
        before leaves no file that the caller does not know of."""
        self.end(db)
        with files.store_errors(target):
            self.path.replace(target)
        self.published = True

    def end(self, db: sqlite3.Connection) -> None:
        rows = [(self.path.name,), *([(self.block.hex(),)] if self.block else [])]
        db.executemany("DELETE FROM unfinished WHERE path = ?", rows)


class Space:
    """Reserving and making room for one store, within `budget`."""

    def __init__(self, place: Place, index: Index, holds: Holds, budget: Budget) -> None:
        self.place, self.index, self.holds, self.budget = place, index, holds, budget
        self.unfinished = Unfinished(place, index, holds.owner)
        self._prepared = False
        self.eviction = Eviction(place, index, holds, self.unfinished)

    def used(self) -> int:
        """Bytes of all files that the budget counts: blocks and sessions as the index counts them,
        unfinished files, quarantine and calibrations."""
        sql = (
            "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM totals)"
            " + (SELECT COALESCE(SUM(bytes), 0) FROM unfinished)"
            " + (SELECT value FROM counters WHERE name = 'session_bytes')"
        )
        found = self.index.query(sql)[0][0] or 0
        few = (self.place.quarantine, self.place.calibrations)
        return int(found) + sum(size for place in few for _, size, _ in files.sizes(place))

    @contextlib.contextmanager
    def write(self, packed: Packed, block: bytes | None = None) -> Iterator[Room]:
        """Make room for a file, write it to tmp/ and yield it to publish. Nothing is left behind.

        A block's name is noted too: killed between rename and row, its file must not outlive the
        block before it, which nothing protects without the row.

        Raises `StoreFull` before anything is written where there is no room to be made.
        """
        needed = (self.place.settings, self.place.blocks, self.place.sessions, self.place.temporary)
        if not self._prepared or not all(map(files.stands, needed)):  # removed under us
            write_settings(self.place)
            self._prepared = True
        self.unfinished.clean_once()
        room, kept = self._reserve(packed.size, block), False
        try:
            files.write_file(room.path, packed)
            yield room
            kept = room.published
        except StoreError as error:
            # Stopped for an hour, or somebody emptied tmp/.
            if isinstance(error.__cause__, FileNotFoundError) and not files.stands(room.path):
                raise Vanished("the file being written went from tmp/", "save again") from error
            raise
        finally:
            self.unfinished.open -= room.names
            if not kept:
                self._give_back(room)

    def _reserve(self, size: int, block: bytes | None = None) -> Room:
        limit = self.budget.capacity
        if limit is not None and size > limit:
            raise StoreFull(
                f"one file of {size} bytes is more than the store's capacity of {limit}",
                "raise it: --capacity, KVSNAP_CAPACITY or kvsnap.json",
            )
        room = Room(self.place.temporary / unfinished_name(self.holds.owner.id), block)
        self.unfinished.open |= room.names
        try:
            self._make_room_for(room, size)
        except BaseException:
            self.unfinished.open -= room.names
            raise
        return room

    def _make_room_for(self, room: Room, size: int) -> None:
        for _ in range(TRIES):
            with self.index.transaction() as db:
                need = self.missing(size)
                if need <= 0:
                    row = (room.path.name, self.holds.owner.id, size)
                    db.execute("INSERT INTO unfinished VALUES (?, ?, ?)", row)
                    if room.block is not None:
                        self.unfinished.note_block(db, room.block, 0)
                    return
            if not self.eviction.make_room(need):
                break
        raise StoreFull(*self._full(size))

    def missing(self, size: int = 0) -> int:
        """How many bytes must go before `size` more fit budget and disk; 0 or less: they fit."""
        over = 0
        if self.budget.capacity is not None:
            over = self.used() + size - self.budget.capacity
        with contextlib.suppress(OSError):
            keep = max(self.budget.min_free, log_room(self.place.root))
            over = max(over, keep + size - disk_free(self.place.root))
        return over

    def _full(self, size: int) -> tuple[str, str]:
        taken = f"{self.used()} bytes are taken by what is pinned, in use or in sessions"
        limit = self.budget.capacity
        if limit is not None:
            taken += f", of {limit} that may be"
        what = (
            f"the store is full: {size} bytes more do not fit; {taken}, and"
            f" {disk_free(self.place.root)} are free on the disk"
        )
        hint = "raise --capacity (or KVSNAP_CAPACITY), unpin or rm a session, or free disk space"
        return what, hint

    def _give_back(self, room: Room) -> None:
        with contextlib.suppress(OSError):
            room.path.unlink()
        with contextlib.suppress(StoreError), self.index.transaction() as db:
            room.end(db)
            if room.published and room.block is not None:  # and its row could not be written
                self.unfinished.finish(db, room.block)
