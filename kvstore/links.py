"""Symbolic links in the place of a store's own folders are refused: what is read, written or deleted
through one of them lies elsewhere, where eviction or tidying up would take other people's files.

Block and session files are opened without following a link in their own place; that does not help
against one in the place of the folder above. Links of other names are left alone as all foreign
things are, and the store's folder itself may be one: whoever names it means it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvsnap.formats.errors import StoreError
from kvsnap.kvstore.place import Place

_NAMES = {
    *("blocks", "sessions", "pins", "tmp", "quarantine", "calibrations"),
    *("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"),
}
"""SQLite follows links, too, and would write its tables into whatever database one leads to."""
_INSIDE = {
    "blocks": re.compile(r"[0-9a-f]{2}"),
    "sessions": re.compile(r"[0-9a-f]{64}|default"),
    "pins": re.compile(r".*", re.DOTALL),  # pins of all folders there count
}
"""Which folders in them are ours: by the first byte of a name, by tenant."""


def refuse_links(place: Place) -> None:
    """Raise `StoreError` where a link stands for a folder of the store or for its index."""
    for path in _links(place):
        raise StoreError(
            f"{path} is a symbolic link, and may lead out of the store",
            "remove it, or put what it leads to in its place",
        )


def _links(place: Place) -> Iterator[Path]:
    yield from (path for path in _links_in(place.root) if path.name in _NAMES)
    for folder, ours in _INSIDE.items():
        yield from (path for path in _links_in(place.root / folder) if ours.fullmatch(path.name))


def _links_in(folder: Path) -> list[Path]:
    """The kernel lists what is a link: no file is asked about. None of what cannot be listed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return [Path(entry.path) for entry in entries if entry.is_symlink()]
    return []
