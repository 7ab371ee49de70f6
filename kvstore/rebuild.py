"""Fill a new index from the files. Only headers and token ids are read; nothing is rewritten."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.formats.block import BlockRecord, block_record
from kvsnap.formats.container import Container, Tensor, header_size, parse_header
from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.kvstore.index import big_endian, root_number, set_reachable_below
from kvsnap.kvstore.place import Place

MISSING = "the file is missing"


@dataclass(frozen=True)
class Found:
    """A block file as its header tells it."""

    record: BlockRecord
    codec: str
    size: int
    mtime_ns: int


def block_paths(place: Place) -> Iterator[Path]:
    """Whatever stands where block files stand, ours or not, in order of name."""
    for folder in sorted(_children(place.blocks)):
        yield from sorted(_children(folder)) if folder.is_dir() else [folder]


def read_record(path: Path) -> Found:
    """The record of a block file from header and ids alone; raises `KvsnapError` or OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("something that is no regular file stands in the file's place")
        with os.fdopen(handle, "rb", closefd=False) as file:
            start = header_size(file.read(8))
            header = parse_header(file.read(min(start, status.st_size) - 8))
            container, size = _described(header, start, status.st_size)
            ids = Tensor("U32", (size // 4,), file.read(size))
    finally:
        os.close(handle)
    return Found(
        block_record(container, ids), container.field("codec"), status.st_size, status.st_mtime_ns
    )


def _described(header: dict[str, Any], start: int, file_size: int) -> tuple[Container, int]:
    """The metadata, and the bytes of the ids, which stand first; the length must be the header's.

    A file that a power cut shortened must not count as stored.
    """
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("the header's metadata is not a table of strings")
    try:
        end = max(entry["data_offsets"][1] for entry in header.values())
        first = header["token_ids"]
        begin, size = first["data_offsets"]
    except (LookupError, TypeError, ValueError) as error:
        raise Damaged("the header does not describe a block") from error
    if type(size) is not int or size < 0 or size % 4 or first.get("shape") != [size // 4]:
        raise Damaged("the header does not describe token ids")
    if start + end != file_size or begin != 0:
        raise Damaged("the file's length is not what its header says")
    return Container(metadata, {}), size


def fill_from_files(place: Place, db: sqlite3.Connection) -> None:
    """Insert every block file that stands under its own name; recency follows the files' times.

    Parents are set when all are in: what a file says of its place must not hide another file. A
    block whose parent is missing is kept, unreachable, until the parent is stored again.
    """
    found = sorted(_readable(place), key=lambda item: item.mtime_ns)
    for number, item in enumerate(found):
        record = item.record
        root = root_number(db, record.root_id, record.identity)
        ids = big_endian(record.token_ids)
        row = (record.name, root, record.start, ids, item.size, item.codec, number)
        db.execute(
            "INSERT OR IGNORE INTO blocks(name, root, start, tokens, bytes, codec, used, reachable)"
            " VALUES (?,?,?,?,?,?,?,0)",
            row,
        )
    for item in found:
        _set_parent(db, item.record)
    firsts = [item.record.name for item in found if item.record.parent == ZERO_PARENT]
    for name in firsts:
        db.execute("UPDATE blocks SET reachable = 1 WHERE name = ?", (name,))
        set_reachable_below(db, name, True)
    db.execute("UPDATE counters SET value = ? WHERE name = 'clock'", (len(found),))


def _set_parent(db: sqlite3.Connection, record: BlockRecord) -> None:
    """Link a block to the one before it; a missing one gets a row that says so."""
    if record.parent == ZERO_PARENT:
        return
    start = max(0, record.start - len(record.token_ids))
    db.execute(
        "INSERT OR IGNORE INTO blocks(name, root, start, tokens, bytes, codec, used, reachable,"
        " lost) SELECT ?, root, ?, x'', 0, '', 0, 0, ? FROM blocks WHERE name = ?",
        (record.parent, start, MISSING, record.name),
    )
    db.execute(
        "UPDATE blocks SET parent = (SELECT id FROM blocks WHERE name = ?) WHERE name = ?",
        (record.parent, record.name),
    )


def _readable(place: Place) -> Iterator[Found]:
    for path in block_paths(place):
        try:
            found = read_record(path)
        except (KvsnapError, OSError):
            continue  # not ours or damaged: verify and doctor tell of it
        plain = found.record.identity.isascii() and found.codec.isascii()
        if plain and place.block(found.record.name) == path:
            yield found


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
