"""Fill a new index from the files. Only headers and token ids are read; nothing is rewritten."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.formats.block import BlockRecord, block_record
from kvsnap.formats.container import Container, Tensor, header_size, parse_header
from kvsnap.formats.errors import Damaged, KvsnapError, StoreError, Vanished
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore import files
from kvsnap.kvstore.index import Index, big_endian, root_number
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.sqlite import statements

MISSING = "the file is missing"
_NAME = re.compile(r"[0-9a-f]{64}")


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
        yield from sorted(_children(folder)) if files.is_folder(folder) else [folder]


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


def fill_from_files(
    place: Place,
    db: sqlite3.Connection,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Insert every block file that stands under its own name; recency follows the files' times.

    Parents are set when all are in: what a file says of its place must not hide another file. A
    block whose parent is missing is kept, unreachable, until the parent is stored again. Memory
    does not grow with the number of files.
    """
    db.execute("CREATE TEMP TABLE IF NOT EXISTS parents(block BLOB, parent BLOB, start INTEGER)")
    db.execute("DELETE FROM parents")
    roots: dict[tuple[str, str], int] = {}
    now = time.time_ns()
    for item in _readable(place, progress):
        record = item.record
        family = (record.root_id, record.identity)
        if family not in roots:
            roots[family] = root_number(db, *family)
        used = min(item.mtime_ns, now) // 1000  # the request counter goes on from there
        ids = big_endian(record.token_ids)
        row = (record.name, roots[family], record.start, ids, item.size, item.codec, used)
        db.execute(
            "INSERT OR IGNORE INTO blocks(name, root, start, tokens, bytes, codec, used, reachable)"
            " VALUES (?,?,?,?,?,?,?,0)",
            row,
        )
        if record.parent != ZERO_PARENT:
            before = max(0, record.start - len(record.token_ids))
            db.execute("INSERT INTO parents VALUES (?, ?, ?)", (record.name, record.parent, before))
    for statement in statements(_LINK):
        db.execute(statement)


_LINK = f"""
INSERT OR IGNORE INTO blocks(name, root, start, tokens, bytes, codec, used, reachable, lost)
  SELECT p.parent, b.root, p.start, x'', 0, '', b.used, 0, '{MISSING}'
  FROM parents p JOIN blocks b ON b.name = p.block;
UPDATE blocks SET parent = above.id FROM parents p JOIN blocks above ON above.name = p.parent
  WHERE blocks.name = p.block;
WITH RECURSIVE there(id) AS (
  SELECT id FROM blocks WHERE parent IS NULL AND start = 0 AND lost IS NULL
  UNION ALL
  SELECT b.id FROM blocks b JOIN there ON b.parent = there.id WHERE b.lost IS NULL)
UPDATE blocks SET reachable = 1 WHERE id IN there;
UPDATE counters SET value = (SELECT COALESCE(MAX(used), 0) FROM blocks) WHERE name = 'clock';
DROP TABLE parents
"""


def _readable(place: Place, progress: Callable[[int, int], None]) -> Iterator[Found]:
    total = sum(len(_children(folder)) for folder in _children(place.blocks))
    for number, path in enumerate(block_paths(place)):
        if number % 256 == 0:
            progress(number, total)
        if number == total - 1:
            progress(total, total)
        found = read_ours(place, path)
        if found is not None:
            yield found


def read_ours(place: Place, path: Path) -> Found | None:
    """The same for a file that stands under its own name; None for one that is not ours, or
    damaged: verify and doctor tell of it."""
    try:
        found = read_record(path)
    except (KvsnapError, OSError):
        return None
    plain = found.record.identity.isascii() and found.codec.isascii()
    return found if plain and place.block(found.record.name) == path else None


def block_names(place: Place, first_byte: int) -> set[bytes]:
    """The names under which files stand in one of the 256 folders."""
    folder = place.blocks / f"{first_byte:02x}"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        stems = [entry.name.removesuffix(SUFFIX) for entry in entries]
        return {bytes.fromhex(stem) for stem in stems if _NAME.fullmatch(stem)}
    return set()


def adopt(index: Index, db: sqlite3.Connection, found: Found) -> None:
    """Give a file that has none a row, inside a transaction; one whose parent is missing waits,
    unreachable, as after a rebuild."""
    record = found.record
    try:
        index.insert(db, record, found.size, found.codec, synced=False)
    except Vanished:
        root = root_number(db, record.root_id, record.identity)
        db.execute("INSERT OR IGNORE INTO totals VALUES (?, ?, 0, 0)", (root, found.codec))
        before = max(0, record.start - len(record.token_ids))
        db.execute(
            "INSERT OR IGNORE INTO blocks(name, root, start, tokens, bytes, codec, used, reachable,"
            " lost) VALUES (?, ?, ?, x'', 0, '', 0, 0, ?)",
            (record.parent, root, before, MISSING),
        )
        db.execute(
            "INSERT INTO blocks(name, parent, root, start, tokens, bytes, codec, used, reachable)"
            " VALUES (?, (SELECT id FROM blocks WHERE name = ?), ?, ?, ?, ?, ?, 0, 0)"
            " ON CONFLICT(name) DO UPDATE SET parent = excluded.parent, root = excluded.root,"
            " tokens = excluded.tokens, bytes = excluded.bytes, codec = excluded.codec, lost = NULL",
            (
                record.name,
                record.parent,
                root,
                record.start,
                big_endian(record.token_ids),
                found.size,
                found.codec,
            ),
        )


def _children(folder: Path) -> list[Path]:
    """What is in a folder. One that cannot be read now is an error: its blocks must not count as
    missing until the index is built the next time."""
    try:
        with files.store_errors(folder):
            return list(folder.iterdir())
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return []
        raise
