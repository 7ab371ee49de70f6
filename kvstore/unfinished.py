"""Files in tmp/: of running writers, and what killed ones left.

A file of a dead writer goes after a grace time and is counted until then. Age alone does not prove
that a writer is dead (it may be stopped): the owner in the file's name must be gone as well.
"""

from __future__ import annotations

import contextlib
import re
import secrets
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
_OURS = re.compile(r"([0-9a-f]{16})(\.[0-9a-f]{16}\.part|\.owner)")
"""Names in tmp/ that are kvsnap's; whatever else lies there is left alone."""


def unfinished_name(owner: str) -> str:
    """A new name in tmp/. It has nothing of the final name in it: a name near the file system's
    limit must still be storable, and two writers of one name must not meet."""
    return f"{owner}.{secrets.token_hex(8)}.part"


class Unfinished:
    """The files in tmp/ of one store, and their reservations."""

    def __init__(self, place: Place, index: Index, owner: Owner) -> None:
        self.place, self.index, self.owner = place, index, owner
        self._cleaned = False

    def clean_once(self) -> None:
        """Once a process: whoever writes first tidies up after those who died."""
        if not self._cleaned:
            self._cleaned = True
            self.clean(list(self.over()))

    def over(self) -> Iterator[tuple[Path, int]]:
        """Files of dead writers past the grace time, with their sizes."""
        for path, size, changed in files.sizes(self.place.temporary):
            ours = _OURS.fullmatch(path.name)
            old = time.time() - changed > GRACE_SECONDS
            if ours and old and not self.owner.is_alive(ours[1]):
                yield path, size

    def clean(self, paths: list[tuple[Path, int]]) -> int:
        """Delete them with their reservations; returns the bytes freed. Errors never matter."""
        freed = 0
        for path, size in paths:
            with contextlib.suppress(OSError):
                path.unlink()
                freed += size
        self.recount()
        return freed

    def recount(self) -> None:
        """Make the reservations those of the files that are there and of live writers."""
        there = {
            path.name: size
            for path, size, _ in files.sizes(self.place.temporary)
            if _OURS.fullmatch(path.name) and size
        }
        with contextlib.suppress(StoreError):
            rows = dict(self.index.query("SELECT path, owner FROM unfinished"))
            gone = [p for p, o in rows.items() if p not in there and not self.owner.is_alive(o)]
            new = [(n, n.split(".")[0], size) for n, size in there.items() if n not in rows]
            if gone or new:
                with self.index.transaction() as db:
                    db.executemany("DELETE FROM unfinished WHERE path = ?", [(p,) for p in gone])
                    db.executemany("INSERT OR IGNORE INTO unfinished VALUES (?, ?, ?)", new)
