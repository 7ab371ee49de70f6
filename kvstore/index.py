"""The index: what the files are, in SQLite, rebuildable from them at any time.

One row a block. The parent is a foreign key with RESTRICT, so that closure under parent is the
database's doing. `reachable` is 1 where the block and all before it are there; `lost` holds the
reason where a block's file was set aside or found missing while its row is still needed (it may
have children, and verify tells of it). Children of a parent are ordered by their token ids as
big-endian bytes: the sibling with the longest common prefix is a neighbour of the asked ids.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import Damaged, ParentMissing, StoreReadOnly
from kvsnap.formats.names import ZERO_PARENT, TokenIds
from kvsnap.kvstore.sqlite import ERRORS, connect, is_damage, sqlite_errors

INDEX_VERSION = 1
_SCHEMA = """
CREATE TABLE roots(
  id INTEGER PRIMARY KEY, root_id TEXT NOT NULL UNIQUE, identity TEXT NOT NULL);
CREATE TABLE blocks(
  id INTEGER PRIMARY KEY,
  name BLOB NOT NULL UNIQUE,
  parent INTEGER REFERENCES blocks(id) ON DELETE RESTRICT,
  root INTEGER NOT NULL REFERENCES roots(id),
  start INTEGER NOT NULL,
  tokens BLOB NOT NULL,
  bytes INTEGER NOT NULL,
  codec TEXT NOT NULL,
  used INTEGER NOT NULL,
  synced INTEGER NOT NULL DEFAULT 0,
  reachable INTEGER NOT NULL,
  lost TEXT);
CREATE INDEX children ON blocks(root, parent, tokens);
CREATE INDEX parents ON blocks(parent);
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO counters VALUES ('clock', 0), ('requests', 0), ('reused_tokens', 0), ('computed_tokens', 0);
CREATE TABLE weights(
  path TEXT PRIMARY KEY, stamp TEXT NOT NULL, digest TEXT NOT NULL);
"""
_DESCENDANTS = """
WITH RECURSIVE below(id) AS (
  SELECT id FROM blocks WHERE parent = :id {only}
  UNION ALL SELECT b.id FROM blocks b JOIN below ON b.parent = below.id {only_b})
UPDATE blocks SET reachable = :reachable WHERE id IN below
"""


@dataclass(frozen=True)
class Row:
    """One block as the index knows it."""

    name: bytes
    start: int
    tokens: bytes
    bytes: int
    synced: bool
    reachable: bool
    lost: str | None


_ROW = "name, start, tokens, bytes, synced, reachable, lost"


def big_endian(token_ids: TokenIds) -> bytes:
    """Token ids as bytes that sort like the ids do."""
    return token_ids.astype(">u4").tobytes()


class Index:
    """All SQL is here and in rebuild.py. One connection a thread; usable by many processes.

    `fill` is called with a connection inside a transaction when the tables are new: it puts in
    what the files say.
    """

    def __init__(self, path: Path, fill: Callable[[sqlite3.Connection], None]) -> None:
        self.path = path
        self._fill = fill
        self._local = threading.local()
        self._damaged = False
        """A damaged index stands where it cannot be removed: pass it over."""

    def find(self, name: bytes) -> Row | None:
        found = self._rows(f"SELECT {_ROW} FROM blocks WHERE name = ?", [name])
        return found[0] if found else None

    def is_reachable(self, name: bytes) -> bool:
        return bool(self.query("SELECT 1 FROM blocks WHERE name = ? AND reachable = 1", [name]))

    def neighbours(self, root_id: str, parent: bytes, tokens: bytes) -> list[Row]:
        """The reachable children of `parent` next to `tokens` in order: at most one either side."""
        keys = self.query(
            "SELECT r.id, (SELECT id FROM blocks WHERE name = ?) FROM roots r WHERE root_id = ?",
            [parent, root_id],
        )
        if not keys or (keys[0][1] is None and parent != ZERO_PARENT):
            return []
        where = f"SELECT {_ROW} FROM blocks WHERE root = ? AND parent IS ? AND reachable = 1"
        after = f"{where} AND tokens >= ? ORDER BY tokens LIMIT 1"
        before = f"{where} AND tokens < ? ORDER BY tokens DESC LIMIT 1"
        return self._rows(after, [*keys[0], tokens]) + self._rows(before, [*keys[0], tokens])

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """`BEGIN IMMEDIATE` … commit; rolled back on any error. Nothing slow belongs inside.

        Raises `IndexDamaged` where that shows: try again, once.
        """
        if not os.access(self.path.parent, os.W_OK):
            raise StoreReadOnly(
                f"cannot write to the store in {self.path.parent}",
                "check the folder's owner and mode, or point --store elsewhere",
            )
        connection = self._connection(for_writing=True)
        with sqlite_errors(self.path):
            try:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if isinstance(error, ERRORS) and is_damage(error):
                    self._discard()
                raise

    def insert(
        self, db: sqlite3.Connection, record: BlockRecord, size: int, codec: str, *, synced: bool
    ) -> None:
        """Add or renew a block's row inside a transaction; its parent must be there.

        Storing a lost block again makes what follows it reachable.
        """
        root = root_number(db, record.root_id, record.identity)
        parent = None
        reachable = True
        if record.parent != ZERO_PARENT:
            found = db.execute(
                "SELECT id, reachable FROM blocks WHERE name = ? AND lost IS NULL",
                (record.parent,),
            ).fetchone()
            if found is None:
                raise ParentMissing(
                    "the block before this one went from the store while it was saved",
                    "save again",
                )
            parent, reachable = found[0], bool(found[1])
        db.execute(
            "INSERT INTO blocks(name, parent, root, start, tokens, bytes, codec, used, synced,"
            " reachable) VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT(name) DO UPDATE SET"
            " parent = excluded.parent, root = excluded.root, start = excluded.start,"
            " tokens = excluded.tokens, bytes = excluded.bytes, codec = excluded.codec,"
            " synced = excluded.synced, reachable = excluded.reachable, lost = NULL",
            (
                record.name,
                parent,
                root,
                record.start,
                big_endian(record.token_ids),
                size,
                codec,
                _counter(db, "clock"),
                int(synced),
                int(reachable),
            ),
        )
        if reachable:
            set_reachable_below(db, record.name, True)

    def lose(self, db: sqlite3.Connection, name: bytes, reason: str) -> int:
        """Inside a transaction: the block's file is gone. Returns how many follow it, unreachable.

        The row stays with the reason until the block is stored again.
        """
        db.execute("UPDATE blocks SET lost = ?, reachable = 0 WHERE name = ?", (reason, name))
        return set_reachable_below(db, name, False)

    def used(self, deepest: bytes | None, reused: int, computed: int) -> None:
        """Count one request; recency of a whole chain is that of its deepest block."""
        with self.transaction() as db:
            amounts = {
                "clock": 1,
                "requests": 1,
                "reused_tokens": reused,
                "computed_tokens": computed,
            }
            for key, amount in amounts.items():
                db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (amount, key))
            if deepest is not None:
                db.execute(
                    "UPDATE blocks SET used = ? WHERE name = ?", (_counter(db, "clock"), deepest)
                )

    def correct_size(self, db: sqlite3.Connection, name: bytes, size: int) -> None:
        """The file is right and the row is not: believe the file."""
        db.execute("UPDATE blocks SET bytes = ? WHERE name = ?", (size, name))

    def mark_synced(self, names: Sequence[bytes]) -> None:
        with self.transaction() as db:
            db.executemany("UPDATE blocks SET synced = 1 WHERE name = ?", [(n,) for n in names])

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:
        """Read rows; a damaged index is thrown away and built anew from the files."""
        with sqlite_errors(self.path):
            try:
                return self._connection().execute(sql, values).fetchall()
            except ERRORS as error:
                if not is_damage(error):
                    raise
                self._discard()
                return self._connection().execute(sql, values).fetchall()

    def _rows(self, sql: str, values: Sequence[object]) -> list[Row]:
        """Rows of blocks; a row that cannot be one is damage like any other."""
        try:
            return [_row(found) for found in self.query(sql, values)]
        except Damaged:
            self._discard()
            return [_row(found) for found in self.query(sql, values)]

    def close(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None

    def _connection(self, for_writing: bool = False) -> sqlite3.Connection:
        """This thread's connection, opened anew where the file was replaced under it.

        Where the folder is missing or cannot be written, the index is read as it is or built in
        memory; the first write after the folder has come into being opens it properly.
        """
        local = self._local
        held: sqlite3.Connection | None = getattr(local, "connection", None)
        if held is not None:
            current = local.file == _file_key(self.path) or (
                local.in_memory and not self.path.parent.exists()
            )
            if current and not (for_writing and local.in_memory):
                return held
            held.close()
        writable = os.access(self.path.parent, os.W_OK)
        with sqlite_errors(self.path):
            try:
                connection = self._open(writable)
            except ERRORS as error:
                if not is_damage(error):
                    raise
                self._discard()
                connection = self._open(writable)
        local.connection, local.file = connection, _file_key(self.path)
        local.in_memory = not writable
        return connection

    def _discard(self) -> None:
        """Remove a damaged index, which holds nothing that the files lack."""
        self.close()
        self._damaged = True
        if os.access(self.path.parent, os.W_OK):
            self._damaged = False
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def _open(self, writable: bool) -> sqlite3.Connection:
        if writable:
            connection = connect(self.path)
        elif self.path.exists() and not self._damaged:
            # immutable: a WAL database in a folder that cannot be written opens in no other way.
            uri = f"{self.path.absolute().as_uri()}?immutable=1"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None)
        else:
            connection = sqlite3.connect(":memory:", isolation_level=None)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            if _version(connection) == INDEX_VERSION:
                connection.execute("SELECT 1 FROM blocks LIMIT 1")
                return connection
            if not writable:  # an older index cannot be renewed in place: build one in memory
                connection.close()
                connection = sqlite3.connect(":memory:", isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            if _version(connection) != INDEX_VERSION:
                _drop_all(connection)
                for statement in _SCHEMA.split(";\n"):
                    connection.execute(statement)
                self._fill(connection)
                connection.execute(f"PRAGMA user_version = {INDEX_VERSION}")
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection


def root_number(db: sqlite3.Connection, root_id: str, identity: str) -> int:
    db.execute("INSERT OR IGNORE INTO roots(root_id, identity) VALUES (?, ?)", (root_id, identity))
    found: int = db.execute("SELECT id FROM roots WHERE root_id = ?", (root_id,)).fetchone()[0]
    return found


def set_reachable_below(db: sqlite3.Connection, name: bytes, reachable: bool) -> int:
    """Mark what follows a block; on the way back to reachable lost blocks stop the walk."""
    (number,) = db.execute("SELECT id FROM blocks WHERE name = ?", (name,)).fetchone()
    sql = _DESCENDANTS.format(
        only="AND lost IS NULL" if reachable else "",
        only_b="AND b.lost IS NULL" if reachable else "",
    )
    return db.execute(sql, {"id": number, "reachable": int(reachable)}).rowcount


def _row(found: tuple) -> Row:
    name, start, tokens, size, synced, reachable, lost = found
    if [type(value) for value in found[:4]] != [bytes, int, bytes, int]:
        raise Damaged("a row of the index has values of other types")
    impossible = lost is not None and (reachable or not isinstance(lost, str))
    if len(name) != 32 or len(tokens) % 4 or impossible:
        raise Damaged("a row of the index has impossible values")
    return Row(name, start, tokens, size, bool(synced), bool(reachable), lost)


def _counter(db: sqlite3.Connection, name: str) -> int:
    found = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    if found is None or type(found[0]) is not int:
        raise sqlite3.DatabaseError(f"the counter {name} is missing")
    value: int = found[0]
    return value


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _drop_all(db: sqlite3.Connection) -> None:
    db.execute("PRAGMA defer_foreign_keys = ON")
    for table in ("blocks", "roots", "counters", "weights"):
        db.execute(f"DROP TABLE IF EXISTS {table}")


def _file_key(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
