"""Who is alive: a running process holds a lock on a file of its own, which ends with it.

flock ends when its holder dies, however it dies. A process id would not do: it is reused, and two
containers that share a folder have equal ones.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from kvsnap.kvstore import files

try:
    import fcntl
except ImportError:  # Windows: leases end by their expiry alone
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".owner"


class Owner:
    """One open store of one process. Its lock file is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._guard = threading.Lock()
        self._id, self._handle = "", -1
        _owners.add(self)

    @property
    def id(self) -> str:
        """The id, whose lock is held from now on."""
        with self._guard:
            if not self._id or not files.stands(self._path(self._id)):
                self._release()
                self._take()
            return self._id

    @property
    def known(self) -> str:
        """The id, if there is one already."""
        return self._id

    def is_alive(self, owner: str) -> bool:
        """Whether an owner still runs. Where that cannot be told, it counts as alive."""
        if owner == self._id:
            return True
        return is_locked(self._path(owner))

    def release(self) -> None:
        """Let go; the file goes too."""
        with self._guard:
            self._release()

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and must end with the parent."""
        self._guard = threading.Lock()
        if self._handle >= 0:
            os.close(self._handle)
        self._id, self._handle = "", -1

    def _release(self) -> None:
        if self._handle >= 0:
            with contextlib.suppress(OSError):
                self._path(self._id).unlink()
            _unlock(self._handle)
        self._id, self._handle = "", -1

    def _take(self) -> None:
        files.make_dir(self.folder)
        owner = secrets.token_hex(8)
        with files.store_errors(self._path(owner)):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._handle = os.open(self._path(owner), flags, files.FILE_MODE)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks: expiry alone
                fcntl.flock(self._handle, fcntl.LOCK_EX)
        self._id = owner

    def _path(self, owner: str) -> Path:
        return self.folder / f"{owner}{SUFFIX}"

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._release()


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock of an owner's file."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        if fcntl is None:
            return True
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _unlock(handle: int) -> None:
    """Explicitly: to close it would leave the lock to a forked child's copy of the handle."""
    with contextlib.suppress(OSError):
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(handle)


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait, however long, until no other process is in here for the same folder."""
    handle = -1
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle >= 0:
            _unlock(handle)


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def _after_fork() -> None:
    for owner in list(_owners):
        owner.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
