"""SQLite as the index uses it: how a database is opened, and what its errors mean."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvsnap.formats.errors import IndexDamaged, StoreError, StoreFull
from kvsnap.kvstore.files import FILE_MODE, read_only, store_errors

WAIT_SECONDS = 60.0
"""How long to wait for another process's transaction. They hold a rename and a row, never more,
except for a rebuild."""
_TRY_AGAIN = "run the command again: the index is built anew from the files"
_NO_DAMAGE = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_AUTH,
}
"""What SQLite reports of its surroundings; all else (a missing table too) tells of its content."""
_CREATING = threading.Lock()
"""To close a file lets go of the process's locks on it: no connection may be open by then."""
_NO_ROOM = 2**20
_DISK_PER_LOG_PAGE = 2**18
LOG_BYTES = 16 * 2**20
"""What the write-ahead log keeps of the disk. It has a few MB, but the size of the whole index after
a rebuild (669 MB for a million blocks), and would keep that until the last process is done."""
ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""A damaged schema makes error messages that Python's layer fails to decode."""


def open_connection(path: Path | str, *, uri: bool = False) -> sqlite3.Connection:
    """A connection without transactions of its own making. One thread uses it; another one may have
    to close it."""
    return sqlite3.connect(
        path, timeout=WAIT_SECONDS, isolation_level=None, uri=uri, check_same_thread=False
    )


def connect(path: Path) -> sqlite3.Connection:
    """Open the database at `path` for reading and writing; it is created where it is missing."""
    _create(path)
    connection = open_connection(path)
    _use_write_ahead_log(connection)
    # NORMAL: no sync a commit. A lost commit is a block that the next save or rebuild finds again,
    # never a session: those are files.
    connection.execute("PRAGMA synchronous = NORMAL")
    # A plain store's token ids, once it is an encrypted one; some builds of SQLite do this by default.
    connection.execute("PRAGMA secure_delete = ON")
    # The log is copied back when it has 4 MB, SQLite's default (each time costs two syncs), and
    # sooner on a small disk, where it would take the blocks' room: nothing counts it.
    with store_errors(path):
        disk = shutil.disk_usage(path.parent).total
    pages = max(64, min(1000, disk // _DISK_PER_LOG_PAGE))
    connection.execute(f"PRAGMA wal_autocheckpoint = {pages}")
    connection.execute(f"PRAGMA journal_size_limit = {min(LOG_BYTES, 4096 * pages)}")
    return connection


def _create(path: Path) -> None:
    """An empty database with its mode from the first moment on; the log's files inherit it."""
    with _CREATING, store_errors(path), contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE))


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Of several that switch a new database over at once SQLite refuses some without waiting."""
    give_up = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(0.005)


def is_damage(error: Exception) -> bool:
    """Whether an error tells of what is in the database, not of the disk or of other processes."""
    if isinstance(error, sqlite3.ProgrammingError):
        return False
    code = getattr(error, "sqlite_errorcode", None)  # absent where Python's own layer raised
    return code is None or code & 0xFF not in _NO_DAMAGE


def is_full(error: Exception, path: Path) -> bool:
    """Whether an error tells of a full disk. Shared memory that does not fit is an I/O error to
    SQLite, a log that does not is a file that cannot be opened, and both may be other things."""
    text = str(error)
    if "full" in text:
        return True
    if "disk I/O" not in text and "unable to open" not in text:
        return False
    try:
        return shutil.disk_usage(path.parent).free < _NO_ROOM
    except OSError:
        return False


@contextlib.contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into store errors; `IndexDamaged` where the content is at fault."""
    try:
        yield
    except ERRORS as error:
        if is_damage(error):
            raise IndexDamaged(f"the index {path} is damaged: {error}", _TRY_AGAIN) from error
        if is_full(error, path):
            raise StoreFull(
                f"no space left for the store in {path.parent}",
                "free some space or point --store elsewhere; what was stored before is kept",
            ) from error
        if "readonly" in str(error) or "unable to open" in str(error):
            raise read_only(path.parent, str(error)) from error
        raise StoreError(f"the index {path} cannot be used: {error}", _TRY_AGAIN) from error


def statements(script: str) -> list[str]:
    """The statements of a script; those inside a trigger stay together."""
    parts, whole = script.split(";\n"), list[str]()
    inside = False
    for part in parts:
        if inside:
            whole[-1] += ";\n" + part
            inside = not part.strip().startswith("END")
        else:
            whole.append(part)
            inside = "TRIGGER" in part and "BEGIN" in part
    return whole
