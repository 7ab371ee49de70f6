"""Files of the store: written once under a temporary name, read whole, synced on request.

Every OSError that a person can do something about leaves here as one of ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

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
        if doing == "write to" or error.errno == errno.EROFS:
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


def write_file(path: Path, packed: Packed) -> None:
    """Write a whole new file; on any failure nothing is left behind."""
    make_dir(path.parent)
    with store_errors(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                for buffer in packed.buffers:
                    _write_all(file.fileno(), memoryview(buffer).cast("B"))
        except BaseException:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise


def sizes(folder: Path) -> list[tuple[Path, int, float]]:
    """(path, length, time of change) of the regular files in a folder; none where it is missing."""
    found = list[tuple[Path, int, float]]()
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append((Path(entry.path), status.st_size, status.st_mtime))
    return found


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
        return _read_whole(path, scratch, limit)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged("a symbolic link stands in the file's place") from error
        if error.errno != errno.ESTALE:
            raise
    return _read_whole(path, scratch, limit)  # the file was replaced under its handle: once more


def _read_whole(path: Path, scratch: Scratch | None, limit: int) -> memoryview:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
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


def stands(path: Path) -> bool:
    """Whether anything stands there; a link without a target does. Cannot tell: it does."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def file_size(path: Path) -> int | None:
    """Length of a regular file; None where there is none (a link or a folder is none)."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def size_and_change(path: Path) -> tuple[int | None, int]:
    """Length of a regular file and its time of change (ns), which every writing and renaming sets;
    (None, 0) where there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None, 0
    return (status.st_size, status.st_ctime_ns) if stat.S_ISREG(status.st_mode) else (None, 0)


def sync(paths: Iterable[Path]) -> dict[Path, KvsnapError]:
    """Bring files or folders to the device, several at once; returns those that failed, and why."""
    todo = list(dict.fromkeys(paths))
    if len(todo) == 1:
        error = _sync_one(todo[0])
        return {} if error is None else {todo[0]: error}
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
                _fsync(handle)
            finally:
                os.close(handle)
    except KvsnapError as error:
        return error
    return None


def _fsync(handle: int) -> None:
    """fsync; on macOS that alone stops at the drive's cache, where F_FULLFSYNC does not."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):  # not on every kind of volume
            fcntl.fcntl(handle, full)
            return
    os.fsync(handle)


def sync_upwards(folder: Path) -> None:
    """Bring a folder and those that hold it to the device, up to the root of the file system: a
    store in folders that were just made must not vanish as a whole. Foreign ones may be closed."""
    device = folder.stat().st_dev
    for path in (folder, *folder.parents):
        try:
            if path.stat().st_dev != device:
                return
        except OSError:
            return
        error = _sync_one(path)
        if isinstance(error, StoreReadOnly):
            return
        if error is not None:
            raise error


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        written = os.write(handle, data)
        if written <= 0:
            raise OSError(errno.EIO, "write returned 0")
        data = data[written:]
