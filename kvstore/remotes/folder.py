"""A folder as a remote: `file:///mnt/kv`, a network file system included.

What stands below the root belongs to whoever can write there, so no symbolic link below it is
followed, in no part of a path, and nothing but regular files is read. The root itself may be one.

Names with a `+` are no keys and never listed: `tmp+…` is a file that is being written, `lock+` what
`replace` holds. flock reaches the other machines of an NFS mount (v4; v3 where lockd runs) unless it
is mounted with `nolock` or `local_lock`: then writers of one machine exclude each other and those of
two do not. A server that is gone blocks a hard mount in the kernel: only `Limited`
leaves such a call behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blake3 import blake3

from kvsnap.formats.errors import (
    Damaged,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
    UsageError,
)
from kvsnap.kvstore.remotes.base import (
    Buffer,
    Entry,
    Object,
    Remote,
    check_key,
    check_prefix,
    is_key,
    no_object,
    too_long,
)

STALE = 24 * 3600.0
"""Seconds after which a temporary file has lost its writer: no write takes a day."""
_TEMPORARY, _LOCK = "tmp+", "lock+"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would block
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED = (errno.EACCES, errno.EPERM)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_MAY_PASS = (
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN,
    errno.EINTR, errno.EBUSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOENT,
)  # fmt: skip
"""ENOENT arrives here from writes only: somebody tidied away the folder that was written to."""


class Folder(Remote):
    """Objects are files under the URL's path. The folder is made by the first write.

    Modes follow the umask; below a setgid folder the group may do what it may do in that folder, so
    that the members of a team can write into each other's subfolders.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url, self._timeout, self._root = url, timeout, _path(url)
        self._tidied: set[str] = set()

    def get(self, key: str, limit: int) -> Object:
        with self._opened(key) as (handle, size):
            if size > limit:
                raise too_long(key, limit)
            data = _read(handle, size)
            if len(data) < size:
                raise Damaged(f"{key} was cut to {len(data)} bytes while it was read")
        return Object(data, blake3(data).hexdigest())

    def get_start(self, key: str, count: int) -> bytes:
        with self._opened(key) as (handle, size):
            return _read(handle, min(count, size))

    def size(self, key: str) -> int | None:
        with self._errors(key), self._folder_of(key) as (folder, name):
            if folder is not None:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    return status.st_size if stat.S_ISREG(status.st_mode) else None
        return None

    def put(self, key: str, data: Buffer) -> None:
        with self._errors(key), self._no_store(), self._folder_of(key, make=True) as (folder, name):
            assert folder is not None
            self._write(folder, key.rpartition("/")[0], name, memoryview(data).cast("B"))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        with self._errors(key), self._no_store(), self._folder_of(key, make=True) as (folder, name):
            assert folder is not None
            with self._locked(folder, key):
                found: str | None = None
                with contextlib.suppress(NotFound):
                    found = self.get(key, 2**40).version
                if found != version:
                    return False
                self._write(folder, key.rpartition("/")[0], name, memoryview(data).cast("B"))
        return True

    def list(self, prefix: str) -> Iterator[Entry]:
        where = check_prefix(prefix)
        with (
            self._errors(where or "its root"),
            self._no_store(),
            self._folder_of(f"{where}x") as (folder, _),
        ):
            if folder is not None:
                yield from self._walk(folder, where)

    def delete(self, key: str) -> None:
        with self._errors(key), self._no_store(), self._folder_of(key) as (folder, name):
            if folder is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)

    def _walk(self, folder: int, where: str) -> Iterator[Entry]:
        with os.scandir(folder) as entries:
            for entry in entries:
                key = where + entry.name
                if not is_key(key):
                    continue
                with contextlib.suppress(FileNotFoundError):  # gone since the folder was read
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield Entry(key, status.st_size, status.st_mtime)
                    elif stat.S_ISDIR(status.st_mode):
                        below = os.open(entry.name, _FOLDER, dir_fd=folder)
                        try:
                            yield from self._walk(below, f"{key}/")
                        finally:
                            os.close(below)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """A handle to the object's file and its length."""
        with self._errors(key), self._folder_of(key) as (folder, name):
            if folder is None:
                raise no_object(key)
            try:
                handle = os.open(name, _READ, dir_fd=folder)
            except FileNotFoundError:
                raise no_object(key) from None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                raise Damaged(f"{key} is a symbolic link, which is not followed") from None
            try:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise Damaged(f"{key} is no regular file")
                yield handle, status.st_size
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _folder_of(self, key: str, make: bool = False) -> Iterator[tuple[int | None, str]]:
        """A handle to the folder that holds `key`, None where there is none; and the key's last part.
        Opened part by part, so that a link put in between is met and not followed."""
        *parts, name = check_key(key).split("/")
        if make:
            self._root.mkdir(parents=True, exist_ok=True)
        try:
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if make:
                raise
            yield None, name
            return
        try:
            for part in parts:
                below = _enter(folder, part, key, make)
                if below is None:
                    yield None, name
                    return
                folder, above = below, folder
                os.close(above)
            yield folder, name
        finally:
            os.close(folder)

    def _write(self, folder: int, path: str, name: str, data: memoryview) -> None:
        """Whole or not at all: to the device under another name, renamed, and the name to the device."""
        temporary = _TEMPORARY + secrets.token_hex(8)
        handle = os.open(temporary, _NEW, 0o666, dir_fd=folder)
        try:
            try:
                _share(handle, folder)
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
                # By the clock of the file system, not of this machine.
                now = os.fstat(handle).st_mtime
            finally:
                os.close(handle)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
        if path not in self._tidied:  # once: reading the folder for each file would take longer
            self._tidied.add(path)
            _tidy(folder, now - STALE)

    @contextlib.contextmanager
    def _locked(self, folder: int, key: str) -> Iterator[None]:
        """Alone among those who replace in this folder. A writer that dies lets go."""
        # Open for writing: NFS locks nothing else.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(_LOCK, flags, 0o666, dir_fd=folder)
        try:
            with contextlib.suppress(PermissionError):  # another's: only the owner may
                _share(handle, folder)
            end = time.monotonic() + self._timeout
            while not _lock(handle):
                if time.monotonic() > end:
                    raise RemoteDown(
                        f"another writer held the lock beside {key} for {self._timeout:g} s",
                        "try again; a process that hangs there must be ended",
                    )
                time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _no_store(self) -> Iterator[None]:
        """Before anything is changed, or looked through to be changed: no remote has a kvsnap.json,
        and `gc` would take a store's blocks for its own."""
        if (self._root / "kvsnap.json").exists():
            raise RemoteError(
                f"{self.url} is a store, and no remote", "give a folder of its own for a remote"
            )
        yield

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._error(error, what) from error

    def _error(self, error: OSError, what: str) -> RemoteError:
        said = f"{self.url}: {what}: {error.strerror}"
        if error.errno in _FULL:
            return RemoteError(said, "free some space there; what was stored before is kept")
        if error.errno == errno.EROFS:
            return RemoteDenied(said, "mount it writable, or push elsewhere")
        if error.errno in _DENIED:
            return RemoteDenied(said, "check the folder's owner, group and mode")
        if error.errno in _NO_LOCKS:
            return RemoteError(said, "a network folder must be mounted with locks to be pushed to")
        if error.errno in _MAY_PASS:
            return RemoteDown(said, "check that the disk or the network folder answers")
        return RemoteError(said, "check what stands at that path")


def _path(url: str) -> Path:
    parts = urlsplit(url)
    path = unquote(parts.path, errors="surrogateescape")
    if parts.netloc not in ("", "localhost") or not path.startswith("/") or "\0" in path:
        raise UsageError(
            "a folder remote needs an absolute path and no host",
            "for example file:///mnt/kv, with three slashes",
        )
    if parts.query or parts.fragment:
        raise UsageError("a folder remote's URL ends with its path", "write ? as %3F and # as %23")
    return Path(path)


def _enter(folder: int, part: str, key: str, make: bool) -> int | None:
    """A handle to a subfolder; None where there is none and none is to be made."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(part, 0o777, dir_fd=folder)
            made = os.open(part, _FOLDER, dir_fd=folder)
            try:
                _share(made, folder)
            finally:
                os.close(made)
            os.fsync(folder)
    try:
        return os.open(part, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        if make:
            raise
        return None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):  # systems differ for links
            raise
    if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
        raise RemoteError(
            f"a symbolic link stands on the way to {key} and is not followed",
            f"remove the link {part!r}, or point the remote's URL at its target",
        )
    if make:
        raise RemoteError(f"a file stands on the way to {key}", f"move the file {part!r} away")
    return None


def _share(handle: int, folder: int) -> None:
    """Give the group of a setgid folder the rights that it has in that folder."""
    above, mode = os.fstat(folder).st_mode, os.fstat(handle).st_mode
    if above & stat.S_ISGID:
        wanted = above & (0o070 if stat.S_ISDIR(mode) else 0o060)
        if wanted & ~mode:
            os.fchmod(handle, stat.S_IMODE(mode) | wanted)


def _tidy(folder: int, before: float) -> None:
    """Remove temporary files of writers that were killed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_TEMPORARY):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.name, dir_fd=folder)


def _lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, InterruptedError):
        return False
    return True


def _read(handle: int, size: int) -> bytes:
    """Up to `size` bytes: fewer only where the file ends."""
    parts, left = list[bytes](), size
    while left and (part := os.read(handle, min(left, 2**30))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
