"""How much the store may take: asked for by argument, environment or kvsnap.json, or the default.

The budget counts the lengths of all files of blocks, sessions, unfinished writes and quarantine,
of all models together. The index is not counted: it takes about 1 kB a block.
"""

from __future__ import annotations

import os
import re
import reprlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.errors import UsageError
from kvsnap.kvstore import files

DEFAULT_SHARE = 0.10
DEFAULT_MOST = 50 * 10**9
DEFAULT_LEAST = 10**9
"""A cache that nobody set up must not fill a disk: 10 % of it, at most 50 GB. But of less than 1 GB
not even one conversation of a large model (4,000 tokens take 0.5 GB) could be kept."""
MIN_FREE_SHARE = 0.02
MIN_FREE_MOST = 10**9
"""Kept free whatever the budget says; 2 % of a small disk, where 1 GB would be all of it."""
SMALL_DISK = 128_000_000
_UNITS = {"": 1, "b": 1}
_UNITS |= {unit + end: 1000**n for n, unit in enumerate("kmgt", 1) for end in ("", "b")}
_UNITS |= {unit + "ib": 1024**n for n, unit in enumerate("kmgt", 1)}
UNLIMITED = "unlimited"


@dataclass(frozen=True)
class Budget:
    """Bytes; `capacity` None is no limit. `source` says where it was asked for."""

    capacity: int | None
    min_free: int
    source: str


def parse_size(size: str | int) -> int:
    """Bytes from "20GB" (decimal), "20GiB" (binary) or a number; raises `UsageError`."""
    if type(size) is int:
        if size > 0:
            return size
    elif isinstance(size, str):
        found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)", size.strip().lower())
        if found is not None and found[2] in _UNITS:
            value = int(float(found[1]) * _UNITS[found[2]])
            if value > 0:
                return value
    raise UsageError(f"{reprlib.repr(size)} is not a size", "give one like 20GB, 500MB or 1.5TiB")


def budget(
    root: Path,
    stored: tuple[object, object] = (None, None),
    capacity: str | int | None = None,
    min_free: str | int | None = None,
) -> Budget:
    """What holds for the store at `root`; `stored` are kvsnap.json's capacity and min_free.

    The argument wins over KVSNAP_CAPACITY, that over kvsnap.json, that over the default.
    """
    disk = _disk(root)
    limit: int | None = min(max(int(disk * DEFAULT_SHARE), DEFAULT_LEAST), DEFAULT_MOST)
    source = "default"
    choices = [
        (stored[0], "kvsnap.json"),
        (os.environ.get("KVSNAP_CAPACITY") or None, "KVSNAP_CAPACITY"),
        (capacity, "argument"),
    ]
    for chosen, name in choices:
        if chosen is not None:
            limit, source = _size(chosen, name, UNLIMITED), name
    free: int | None = min(int(disk * MIN_FREE_SHARE), MIN_FREE_MOST)
    for chosen, name in [
        (stored[1], "kvsnap.json"),
        (os.environ.get("KVSNAP_MIN_FREE") or None, "KVSNAP_MIN_FREE"),
        (min_free, "argument"),
    ]:
        if chosen is not None:
            free = _size(chosen, name, "0")
    if free is not None and free > disk:
        raise UsageError(
            f"{free} bytes cannot be kept free: the disk has {disk}", "give a smaller --min-free"
        )
    return Budget(limit, free or 0, source)


def log_room(root: Path) -> int:
    """What is kept free on a small disk whatever is asked for: without room for its log the index
    cannot even note what goes."""
    disk = _disk(root)
    return disk // 8 if disk < SMALL_DISK else 0


def disk_free(root: Path) -> int:
    """Bytes that can still be written to the store's disk."""
    return shutil.disk_usage(_existing(root)).free


def _disk(root: Path) -> int:
    with files.store_errors(root):
        return shutil.disk_usage(_existing(root)).total


def _existing(root: Path) -> Path:
    return next((p for p in (root, *root.parents) if files.is_folder(p)), Path("/"))


def _size(value: object, source: str, none: str) -> int | None:
    """A size, or None for the word that means no limit; the error says where the value stands."""
    if str(value).strip().lower() == none:
        return None
    try:
        return parse_size(value)  # type: ignore[arg-type]
    except UsageError as error:
        where = "" if source == "argument" else f" (from {source})"
        raise UsageError(error.what + where, error.hint) from error
