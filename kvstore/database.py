"""The database file under the index: opened, thrown away when damaged, filled from the files.

It knows no blocks: tables come as a schema, their content from a function. One connection a thread
and process; any number of processes may use one file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvsnap.formats.errors import IndexDamaged, StoreError
from kvsnap.kvstore.files import file_size, read_only, stands
from kvsnap.kvstore.locks import one_at_a_time
from kvsnap.kvstore.sqlite import (
    ERRORS,
    WAIT_SECONDS,
    connect,
    is_damage,
    is_full,
    open_connection,
    sqlite_errors,
    statements,
)

Work = Callable[[sqlite3.Connection], None]
MOST_NOTES = 1000
"""Of a store that cannot be written; the oldest go."""
_INHERITED: list[sqlite3.Connection] = []


class Database:
    """A rebuildable SQLite file. `fill` is called inside a transaction when the tables are new,
    before the rules (indexes and triggers) are made."""

    schema = ""
    rules = ""
    tables: tuple[str, ...] = ()
    version = 0

    def __init__(self, path: Path, fill: Work) -> None:
        self.path = path
        self._fill = fill
        self._local = threading.local()
        self._connections: list[tuple[threading.Thread, sqlite3.Connection]] = []
        self._guard = threading.Lock()
        self._noted: deque[Work] = deque(maxlen=MOST_NOTES)
        _databases.add(self)
        self._damaged = False
        """A damaged file stands where it cannot be removed: pass it over."""

    def query(self, sql: str, values: Sequence[object] = ()) -> list[tuple]:
        """Read rows; a damaged file is thrown away and built anew from the store's files."""
        with sqlite_errors(self.path):
            try:
                return self._connection().execute(sql, values).fetchall()
            except ERRORS as error:
                if not is_damage(error):
                    raise
                self.discard()
                return self._connection().execute(sql, values).fetchall()

    @contextlib.contextmanager
    def transaction(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """`BEGIN IMMEDIATE` … commit; rolled back on any error. Nothing slow belongs inside.

        Raises `IndexDamaged` where that shows: try again, once. Without `wait` another process's
        transaction is a `StoreError` after a few milliseconds.
        """
        if not os.access(self.path.parent, os.W_OK):
            raise read_only(self.path.parent)
        connection = self._connection(for_writing=True)
        with sqlite_errors(self.path), self._without_sync(connection, begins=not wait):
            try:
                _begin(connection, wait)
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                if isinstance(error, ERRORS) and is_damage(error):
                    self.discard()
                elif isinstance(error, sqlite3.ProgrammingError) and not self._is(connection):
                    raise IndexDamaged(  # a query in here met the damage, and threw it away
                        f"the index {self.path} was damaged", "run the command again"
                    ) from error
                raise

    @contextlib.contextmanager
    def _without_sync(self, db: sqlite3.Connection, *, begins: bool) -> Iterator[None]:
        """Let a small write begin a new log without waiting for the device.

        Of a log, SQLite syncs the first write: 3 to 13 ms, in front of a first token that takes 50.
        It does so for the frames of an earlier log in the same file; a new file has none. The
        log is synced as ever before it is copied back.
        """
        log = Path(f"{self.path}-wal")
        if not begins or file_size(log):
            yield
            return
        db.execute("PRAGMA synchronous = OFF")
        try:
            yield
        finally:
            with contextlib.suppress(sqlite3.Error):
                db.execute("PRAGMA synchronous = NORMAL")

    def lacks_its_log(self) -> bool:
        """Whether what is read now may be older than what was committed."""
        self.query("SELECT 1")
        return bool(self._local.in_memory and file_size(Path(f"{self.path}-wal")))

    def note(self, work: Work) -> None:
        """Keep a small write for `write_notes`: nobody waits for it, and a first resume has no
        store to write to yet. Only what may be lost is noted."""
        self._noted.append(work)

    def write_notes(self, *, wait: bool = True) -> None:
        """Do what was noted, in one transaction, where the store exists and can be written."""
        works = list[Work]()
        with contextlib.suppress(IndexError):  # empty, also when another thread took the last one
            while True:
                works.append(self._noted.popleft())
        if not works:
            return
        try:
            with self.transaction(wait=wait) as db:
                for work in works:
                    work(db)
        except StoreError:
            self._noted.extendleft(reversed(works))

    def _is(self, connection: sqlite3.Connection) -> bool:
        return getattr(self._local, "connection", None) is connection

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        self._let_go(connection)

    def before_fork(self) -> None:
        """SQLite must not meet a connection in two processes (sqlite.org/howtocorrupt, 2.6): a child
        would take no locks of its own, and the parent would delete the log under it."""
        connection = getattr(self._local, "connection", None)
        if connection is not None and not connection.in_transaction:
            self.close()

    def after_fork(self) -> None:
        """In the child: other threads' connections are kept, unused, for closing them is as bad."""
        _INHERITED.extend(connection for _, connection in self._connections)
        self._connections, self._local = [], threading.local()
        self._guard = threading.Lock()
        self._noted.clear()  # they are the parent's to write

    def _let_go(self, own: sqlite3.Connection | None) -> None:
        """Close a connection of this thread, and those of threads that have ended."""
        with self._guard:
            pairs, self._connections = self._connections, []
            for thread, connection in pairs:
                if connection is own or not thread.is_alive():
                    connection.close()
                else:
                    self._connections.append((thread, connection))

    def discard(self) -> None:
        """Remove a damaged file, which holds nothing that the store's files lack; not the one
        that another process has put in its place meanwhile."""
        opened = getattr(self._local, "file", None)
        self.close()
        self._damaged = True
        if os.access(self.path.parent, os.W_OK):
            self._damaged = False
            # Alone, and the log first: a log must never be deleted that belongs to a newer file.
            with one_at_a_time(self.path.parent):
                if opened in (None, _file_key(self.path)):
                    for suffix in ("-wal", "-shm", ""):
                        Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._local.file = None

    def _connection(self, for_writing: bool = False) -> sqlite3.Connection:
        """This thread's connection, opened anew where the file was replaced under it.

        Where the folder is missing or cannot be written, the file is read as it is or built in
        memory; the first write after the folder has come into being opens it properly.
        """
        local = self._local
        held: sqlite3.Connection | None = getattr(local, "connection", None)
        if held is not None:
            current = local.file == _file_key(self.path) or (
                local.in_memory and not stands(self.path.parent)
            )
            if current and not (for_writing and local.in_memory):
                return held
            local.connection = None  # whatever comes next may fail
            self._let_go(held)
        writable = os.access(self.path.parent, os.W_OK)
        with sqlite_errors(self.path):
            try:
                connection = self._open(writable)
            except ERRORS as error:
                if not for_writing and is_full(error, self.path):
                    writable = False  # as in a folder that cannot be written: read what is there
                elif not is_damage(error):
                    raise
                else:
                    self.discard()
                connection = self._open(writable)
        local.connection, local.file = connection, _file_key(self.path)
        local.in_memory = not writable
        with self._guard:
            self._connections.append((threading.current_thread(), connection))
        return connection

    def _open(self, writable: bool) -> sqlite3.Connection:
        if writable:
            connection = connect(self.path)
        elif stands(self.path) and not self._damaged:
            # immutable: a WAL database in a folder that cannot be written opens in no other way.
            uri = f"{self.path.absolute().as_uri()}?immutable=1"
            connection = open_connection(uri, uri=True)
        else:
            connection = open_connection(":memory:")
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            if _version(connection) == self.version:
                for table in self.tables:
                    connection.execute(f"SELECT 1 FROM {table} LIMIT 1")
                return connection
            if not writable:  # an older index cannot be renewed in place: build one in memory
                connection.close()
                connection = open_connection(":memory:")
            # Filling a new index takes minutes for a million files: the others wait as long, which
            # SQLite's own waiting would not.
            with one_at_a_time(self.path.parent) if writable else contextlib.nullcontext():
                connection.execute("BEGIN IMMEDIATE")
                if _version(connection) != self.version:
                    self._build(connection)
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _build(self, db: sqlite3.Connection) -> None:
        _drop(db, self.tables)
        for statement in statements(self.schema):
            db.execute(statement)
        self._fill(db)
        for statement in statements(self.rules):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {self.version}")


def _begin(db: sqlite3.Connection, wait: bool) -> None:
    if not wait:
        db.execute("PRAGMA busy_timeout = 10")
    try:
        db.execute("BEGIN IMMEDIATE")
    finally:
        if not wait:
            db.execute(f"PRAGMA busy_timeout = {int(WAIT_SECONDS * 1000)}")


def _version(db: sqlite3.Connection) -> int:
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    return version


def _drop(db: sqlite3.Connection, tables: Sequence[str]) -> None:
    db.execute("PRAGMA defer_foreign_keys = ON")
    for table in tables:
        db.execute(f"DROP TABLE IF EXISTS {table}")


def _file_key(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_databases: weakref.WeakSet[Database] = weakref.WeakSet()


def _before_fork() -> None:
    for database in list(_databases):
        database.before_fork()


def _after_fork() -> None:
    for database in list(_databases):
        database.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
