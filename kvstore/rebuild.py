"""Fill a new index from the files. Only headers and token ids are read; nothing is rewritten."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvsnap.formats.block import STATE as STATE_EXTRAS
from kvsnap.formats.block import BlockRecord, block_record
from kvsnap.formats.container import Container, Tensor, header_size, parse_header
from kvsnap.formats.errors import Damaged, KvsnapError, StoreError, Vanished
from kvsnap.formats.fields import digest_field
from kvsnap.formats.manifest import BLOCK, STATE
from kvsnap.formats.names import ZERO_PARENT, token_array
from kvsnap.formats.sealed import KIND as SEALED_KIND
from kvsnap.formats.sealed import clear_of
from kvsnap.formats.session_name import SUFFIX
from kvsnap.formats.signature import signature_of
from kvsnap.kvstore import files
from kvsnap.kvstore.index import Entry, Index, entry_of, root_number, settle_chain_bytes
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.sqlite import statements

MISSING = "the file is missing"
_NAME = re.compile(r"[0-9a-f]{64}")
_FRONT = 4096
"""Header and ids of most blocks: one read instead of three, a fifth of a rebuild's time."""


@dataclass(frozen=True)
class Found:
    """A block file as its header tells it."""

    record: BlockRecord
    codec: str
    size: int
    mtime_ns: int
    file: bytes
    content: bytes
    """Its two digests, as it states them; of a sealed file the second is not known."""
    signer: str
    length: int
    """Tokens."""
    sealed_for: str = ""
    """Tenant id; empty for a file that is not sealed. If it is, the record has neither token ids nor an
    identity."""

    @property
    def stop(self) -> int:
        return self.record.start + self.length

    @property
    def entry(self) -> Entry:
        entry = entry_of(self.record, self.size, self.codec, self.signer, self.sealed_for)
        return replace(entry, length=self.length)


def block_paths(place: Place) -> Iterator[Path]:
    """Whatever stands where block files stand, ours or not, in order of name."""
    for folder in _children(place.blocks):
        yield from _children(folder) if files.is_folder(folder) else [folder]


def read_record(path: Path) -> Found:
    """The record of a block file from header and ids alone; raises `KvsnapError` or OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("something that is no regular file stands in the file's place")
        front = os.pread(handle, _FRONT, 0)
        start = header_size(front[:8])
        front = _as_far_as(handle, front, min(start, status.st_size))
        container, size = _described(parse_header(front[8:start]), start, status.st_size)
        if container.metadata.get("kind") == SEALED_KIND:
            return _sealed(container, status)
        front = _as_far_as(handle, front, start + size)
        if len(front) < start + size:  # by whoever writes there besides us
            raise Damaged("the file was cut while it was read")
        ids = Tensor("U32", (size // 4,), front[start : start + size])
    finally:
        os.close(handle)
    signature = signature_of(container.metadata)
    return Found(
        block_record(container, ids),
        container.field("codec"),
        status.st_size,
        status.st_mtime_ns,
        digest_field(container, "file"),
        digest_field(container, "content"),
        signature.signer if signature is not None else "",
        size // 4,
    )


def _sealed(container: Container, status: os.stat_result) -> Found:
    """What can be told of a sealed file without its key."""
    clear = clear_of(container)
    if clear.kind not in (BLOCK, STATE):
        raise Damaged(f"a sealed {clear.kind} where a block belongs")
    record = BlockRecord(
        clear.name,
        clear.parent,
        clear.root_id,
        clear.start,
        token_array([]),
        "",
        STATE_EXTRAS if clear.kind == STATE else b"",
    )
    digest = digest_field(container, "file")
    size, changed = status.st_size, status.st_mtime_ns
    signer, length, tenant = clear.signer, clear.tokens, clear.tenant_id
    return Found(record, "", size, changed, digest, b"", signer, length, tenant)


def _as_far_as(handle: int, front: bytes, end: int) -> bytes:
    """A file's first bytes, at least so many; its length was looked at before."""
    more = end - len(front)
    return front + os.pread(handle, more, len(front)) if more > 0 else front


def _described(header: dict[str, Any], start: int, file_size: int) -> tuple[Container, int]:
    """The metadata, and the bytes of the ids, which stand first; the length must be the header's.

    A file that a power cut shortened must not count as stored.
    """
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("the header's metadata is not a table of strings")
    try:
        end = max(entry["data_offsets"][1] for entry in header.values())
        sealed = metadata.get("kind") == SEALED_KIND
        first = header["sealed" if sealed else "token_ids"]
        begin, size = first["data_offsets"]
    except (LookupError, TypeError, ValueError) as error:
        raise Damaged("the header does not describe a block") from error
    item = 1 if sealed else 4
    if type(size) is not int or size < 0 or size % item or first.get("shape") != [size // item]:
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
    for statement in statements(_BEFORE):
        db.execute(statement)
    roots: dict[tuple[str, str, str], int] = {}
    now, clock = time.time_ns(), 0
    for item in _readable(place, progress):
        record = item.record
        family = (record.root_id, record.identity, item.sealed_for)
        if family not in roots:
            roots[family] = root_number(db, *family)
        used = min(item.mtime_ns, now) // 1000  # the request counter goes on from there
        clock = max(clock, used)
        entry = item.entry
        row = (
            record.name,
            roots[family],
            record.start,
            entry.tokens,
            entry.length,
            int(entry.sealed),
            int(entry.state),
            item.size,
            entry.codec,
            item.signer,
            used,
        )
        added = db.execute(
            "INSERT OR IGNORE INTO blocks(name, root, start, tokens, length, sealed, state, bytes,"
            " codec, signer, used, reachable) VALUES (?,?,?,?,?,?,?,?,?,?,?,0)",
            row,
        )
        # A folder that changes while it is listed may name a file twice.
        if added.rowcount and record.parent != ZERO_PARENT:
            before = max(0, record.start - place.block_size)
            own = (added.lastrowid, record.parent, before, item.size)
            db.execute("INSERT INTO parents VALUES (?, ?, ?, ?)", own)
    db.execute("UPDATE counters SET value = ? WHERE name = 'clock'", (clock,))
    for statement in statements(_LINK):
        db.execute(statement)


_BEFORE = """
DROP TABLE IF EXISTS temp.parents;
DROP TABLE IF EXISTS temp.tree;
DROP TABLE IF EXISTS temp.walked;
CREATE TEMP TABLE parents(block INTEGER PRIMARY KEY, parent BLOB, start INTEGER, bytes INTEGER);
CREATE TEMP TABLE tree(block INTEGER PRIMARY KEY, parent INTEGER, bytes INTEGER);
CREATE TEMP TABLE walked(block INTEGER PRIMARY KEY, total INTEGER, reachable INTEGER)
"""
_LINK = f"""
INSERT OR IGNORE INTO blocks(name, root, start, tokens, length, bytes, codec, used, reachable,
    lost)
  SELECT p.parent, b.root, p.start, x'', 0, 0, '', b.used, 0, '{MISSING}'
  FROM parents p JOIN blocks b ON b.id = p.block
  WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE name = p.parent);
INSERT INTO tree SELECT p.block, above.id, p.bytes
  FROM parents p JOIN blocks above ON above.name = p.parent;
CREATE INDEX temp.tree_down ON tree(parent, block, bytes);
INSERT INTO walked
  WITH RECURSIVE below(id, total, reachable) AS (
    SELECT id, bytes, start = 0 AND lost IS NULL FROM blocks
      WHERE NOT EXISTS (SELECT 1 FROM tree WHERE block = id)
    UNION ALL
    SELECT t.block, below.total + t.bytes, below.reachable
      FROM below JOIN tree t ON t.parent = below.id)
  SELECT * FROM below ORDER BY id;
UPDATE blocks SET
  parent = (SELECT parent FROM tree WHERE block = id),
  children = (SELECT COUNT(*) FROM tree WHERE tree.parent = blocks.id),
  chain_bytes = COALESCE((SELECT total FROM walked WHERE block = id), 0),
  reachable = COALESCE((SELECT w.reachable FROM walked w WHERE w.block = id), 0);
DROP TABLE parents;
DROP TABLE tree;
DROP TABLE walked
"""
"""The walk reads an index of a few bytes a row, and each row of `blocks` is written once more, in
order. Three statements that each updated all rows, in the order of the walk, took twice as long."""


def _readable(place: Place, progress: Callable[[int, int], None]) -> Iterator[Found]:
    total = sum(len(_names(folder)) for folder in _children(place.blocks))
    for number, path in enumerate(block_paths(place)):
        if number % 256 == 0:
            progress(number, total)
        if number == total - 1:
            progress(total, total)
        found = read_ours(path)
        if found is not None:
            yield found


def read_ours(path: Path) -> Found | None:
    """The same for a file that stands under its own name; None for one that is not ours, or
    damaged: verify and doctor tell of it."""
    try:
        found = read_record(path)
    except (KvsnapError, OSError):
        return None
    plain = found.record.identity.isascii() and found.codec.isascii()
    text = found.record.name.hex()
    own = path.name == f"{text}{SUFFIX}" and path.parent.name == text[:2]
    return found if plain and own else None


def block_names(place: Place, first_byte: int) -> set[bytes]:
    """The names under which files stand in one of the 256 folders."""
    folder = place.blocks / f"{first_byte:02x}"
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        stems = [entry.name.removesuffix(SUFFIX) for entry in entries]
        return {bytes.fromhex(stem) for stem in stems if _NAME.fullmatch(stem)}
    return set()


def adopt(index: Index, db: sqlite3.Connection, found: Found, block_size: int) -> None:
    """Give a file that has none a row, inside a transaction; one whose parent is missing waits,
    unreachable, as after a rebuild."""
    record, entry = found.record, found.entry
    try:
        index.insert(db, entry)
    except Vanished:
        root = root_number(db, record.root_id, record.identity, entry.sealed_for)
        db.execute("INSERT OR IGNORE INTO totals VALUES (?, ?, 0, 0)", (root, entry.codec))
        before = max(0, record.start - block_size)
        db.execute(
            "INSERT OR IGNORE INTO blocks(name, root, start, tokens, length, bytes, codec, used,"
            " reachable, lost) VALUES (?, ?, ?, x'', 0, 0, '', 0, 0, ?)",
            (record.parent, root, before, MISSING),
        )
        db.execute(
            "INSERT INTO blocks(name, parent, root, start, tokens, length, sealed, state, bytes, codec,"
            " signer, used, reachable) VALUES"
            " (?, (SELECT id FROM blocks WHERE name = ?), ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0)"
            " ON CONFLICT(name) DO UPDATE SET parent = excluded.parent, root = excluded.root,"
            " tokens = excluded.tokens, length = excluded.length, sealed = excluded.sealed,"
            " state = excluded.state, bytes = excluded.bytes,"
            " codec = excluded.codec, signer = excluded.signer, lost = NULL",
            (
                record.name,
                record.parent,
                root,
                record.start,
                entry.tokens,
                entry.length,
                int(entry.sealed),
                int(entry.state),
                found.size,
                entry.codec,
                found.signer,
            ),
        )
        settle_chain_bytes(db, record.name)


def _children(folder: Path) -> list[Path]:
    return [folder / name for name in sorted(_names(folder))]


def _names(folder: Path) -> list[str]:
    """What is in a folder. One that cannot be read now is an error: its blocks must not count as
    missing until the index is built the next time."""
    try:
        with files.store_errors(folder):
            return os.listdir(folder)  # noqa: PTH208 - a path takes ten times as long as a name
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return []
        raise
