"""Files of the store: written once under a temporary name, read whole, synced on request.

Every OSError that a person can do something about leaves here as one of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvsnap.formats.container import MAX_HEADER, Packed
from kvsnap.formats.errors import Damaged, KvsnapError, StoreError, StoreFull, StoreReadOnly
from kvsnap.formats.rowset import MAX_DECODED

FILE_MODE = 0o600
DIR_MODE = 0o700
MAX_FILE = MAX_DECODED + 2 * MAX_HEADER
"""No file of a store is longer; a sparse one may claim terabytes, and memory must not follow."""
SYNC_THREADS = 8
"""fsync waits for the device, not for a core: eight at once took 0.3x of one by one here."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


def store_error(error: OSError, path: Path, doing: str = "write to") -> KvsnapError:
    """The store error that an operating system error means."""
    if error.errno in _FULL:
        return StoreFull(
            f"no space left for the store in {path.parent} ({error.strerror})",
            "free some space or point --store elsewhere; what was stored before is kept",
        )
    if error.errno in _READ_ONLY:
        if doing == "write to":
            return read_only(path.parent, error.strerror or "")
        return StoreError(f"cannot {doing} {path} ({error.strerror})", "check its owner and mode")
    return StoreError(f"{path}: {error.strerror}", "check the disk; kvsnap doctor says more")


def read_only(folder: Path, why: str = "") -> StoreReadOnly:
    """The error for a store that nothing can be written to."""
    return StoreReadOnly(
        f"cannot write to the store in {folder}" + (f" ({why})" if why else ""),
        "check the folder's owner and mode, or point --store elsewhere",
    )


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn OSErrors of the block into store errors that name `path`."""
    try:
        yield
    except OSError as error:
        raise store_error(error, path) from error


def make_dir(path: Path) -> None:
    """Create a folder of the store with its mode from the first moment on; existing is fine."""
    with store_errors(path):
        path.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)


def write_temporary(folder: Path, packed: Packed) -> Path:
    """Write a whole new file under a random name; on any failure nothing is left behind.

    The name has nothing of the final name in it: a name near the file system's limit must still
    be storable, and two writers of one name must not meet.
    """
    make_dir(folder)
    path = folder / f"{secrets.token_hex(16)}.part"
    with store_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for buffer in packed.buffers:
                    _write_all(file.fileno(), memoryview(buffer).cast("B"))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
    return path


class Scratch(threading.local):
    """One growing buffer a thread. Fresh memory for each block costs a page fault every 4 KiB:
    reading 1,500 tokens took 15 ms into fresh buffers, 4 ms into this one."""

    buffer: np.ndarray = np.empty(0, np.uint8)

    def take(self, size: int) -> memoryview:
        if size > len(self.buffer):
            self.buffer = np.empty(size + size // 8, np.uint8)
        return self.buffer.data.cast("B")[:size]


def read_whole(path: Path, scratch: Scratch | None = None, limit: int = MAX_FILE) -> memoryview:
    """A file's bytes in a buffer, never a mapping: a mapped file can change under an engine.

    The buffer is fresh, or the thread's scratch, which the next read overwrites.

    Raises FileNotFoundError, PermissionError and OSError as they come, and `Damaged` for what is
    no regular file, longer than `limit`, or changes its length meanwhile.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged("a symbolic link stands in the file's place") from error
        raise
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Damaged("something that is no regular file stands in the file's place")
        size = status.st_size
        if size > limit:
            raise Damaged(f"the file has {size} bytes, more than it can need")
        buffer = scratch.take(size) if scratch else np.empty(size, np.uint8).data.cast("B")
        at = 0
        while at < len(buffer):
            count = os.readv(handle, [buffer[at:]])
            if count == 0:
                raise Damaged(f"the file was cut to {at} bytes while it was read")
            at += count
    finally:
        os.close(handle)
    return buffer


def file_size(path: Path) -> int | None:
    """Length of a regular file; None where there is none (a link or a folder is none)."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def sync(paths: Iterable[Path]) -> dict[Path, KvsnapError]:
    """Bring files or folders to the device, several at once; returns those that failed, and why."""
    todo = list(dict.fromkeys(paths))
    with ThreadPoolExecutor(SYNC_THREADS) as pool:
        results = zip(todo, pool.map(_sync_one, todo), strict=True)
        return {path: error for path, error in results if error is not None}


def sync_all(paths: Iterable[Path]) -> None:
    """The same, raising the first failure."""
    for error in sync(paths).values():
        raise error


def _sync_one(path: Path) -> KvsnapError | None:
    try:
        with store_errors(path):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if hasattr(os, "F_FULLFSYNC"):  # macOS: fsync alone stops at the drive's cache
                    import fcntl

                    fcntl.fcntl(handle, os.F_FULLFSYNC)
                else:
                    os.fsync(handle)
            finally:
                os.close(handle)
    except KvsnapError as error:
        return error
    return None


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        written = os.write(handle, data)
        if written <= 0:
            raise OSError(errno.EIO, "write returned 0")
        data = data[written:]
