"""A portable file as a remote: see `kvsnap.formats.archive` for its bytes.

`Archive.open(path)` reads one that is there, `Archive.create(path)` writes a new one. Neither has a
URL: an archive is a file that a person names, not a place that machines share.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from kvsnap.formats.archive import END, MAX_MEMBERS, MAX_SIZE, Member, members, pack_header, padding
from kvsnap.formats.errors import Damaged, NotFound, PartlyDone, RemoteError, Unsupported
from kvsnap.kvstore.remotes.base import (
    Abilities,
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

FILE_MODE = 0o600
"""As the store's own files: what was said stands in it, and its owner says who may read that."""
_MOST = 1 << 30
"""Bytes asked of one pread: Linux gives at most 2 GiB less a page."""
_COPY_AGAIN = "copy the file again, or export the session again from where it is whole"


class Archive(Remote):
    """Reads members where they lie. Nothing can be written; threads may read at once."""

    abilities = Abilities(write=False, replace_if=False)

    def __init__(self, path: Path, file: int, changed: float) -> None:
        self.url = str(path)
        self._path = path
        self._file = file
        self._changed = changed
        self._members: dict[str, Member] = {}

    @classmethod
    def open(cls, path: Path) -> Archive:
        """Look through the headers of a file. `NotFound` for none, `Damaged` for one that is cut or
        holds anything but files of ours."""
        with _errors(path, "read"):
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise Damaged(f"{path} is no regular file", _COPY_AGAIN)
            found = cls(path, file, status.st_mtime)
            with _errors(path, "read"):
                found._scan(status.st_size)
        except Damaged as error:
            os.close(file)
            told = error.what if str(path) in error.what else f"{path}: {error.what}"
            raise Damaged(told, _COPY_AGAIN) from error
        except BaseException:
            os.close(file)
            raise
        return found

    @classmethod
    def create(cls, path: Path) -> NewArchive:
        """Begin a file, which takes the place of one that is there when it is closed."""
        beside = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}.unfinished")
        with _errors(path, "write"):
            file = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        return NewArchive(path, file, beside)

    def get(self, key: str, limit: int) -> Object:
        member = self._find(key)
        if member.size > limit:
            raise too_long(key, limit)
        data = self._read(member, member.size)
        return Object(data, blake3(data).hexdigest())

    def get_start(self, key: str, count: int) -> bytes:
        member = self._find(key)
        return self._read(member, min(count, member.size))

    def size(self, key: str) -> int | None:
        member = self._members.get(check_key(key))
        return None if member is None else member.size

    def put(self, key: str, data: Buffer) -> None:
        raise self._unsupported()

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        raise self._unsupported()

    def delete(self, key: str) -> None:
        raise self._unsupported()

    def list(self, prefix: str) -> Iterator[Entry]:
        check_prefix(prefix)
        for member in tuple(self._members.values()):
            if member.name.startswith(prefix):
                yield Entry(member.name, member.size, self._changed)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _scan(self, length: int) -> None:
        for member in members(lambda at, count: os.pread(self._file, count, at), length):
            if not is_key(member.name):
                raise Damaged(f"a member of {self.url} has no name of ours: {member.name[:80]!r}")
            if member.name in self._members:
                raise Damaged(f"{self.url} has {member.name} twice")
            self._members[member.name] = member

    def _find(self, key: str) -> Member:
        member = self._members.get(check_key(key))
        if member is None:
            raise no_object(key)
        return member

    def _read(self, member: Member, count: int) -> bytes:
        parts = list[bytes]()
        at, end = member.start, member.start + count
        with _errors(self._path, "read"):
            while at < end:
                part = os.pread(self._file, min(end - at, _MOST), at)
                if not part:
                    raise Damaged(f"{self.url} was cut while it was read")
                parts.append(part)
                at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _unsupported(self) -> Unsupported:
        return Unsupported(
            f"nothing in the archive {self.url} can be changed", "import it, and export it anew"
        )


class NewArchive(Archive):
    """An archive in the making, in a file beside its place. `close` brings it to the device and
    into its place; `abandon`, or leaving a `with` block by an error, leaves nothing.

    Members stand in the order of their `put`, and each is written once: putting the same bytes
    again does nothing.
    """

    abilities = Abilities(in_turn=True)

    def __init__(self, path: Path, file: int, beside: Path) -> None:
        super().__init__(path, file, time.time())
        self._beside = beside
        self._lock = threading.Lock()
        self._end = 0

    def put(self, key: str, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        if len(view) > MAX_SIZE or len(self._members) >= MAX_MEMBERS:
            raise RemoteError(
                f"{self.url} has no room for {key}",
                f"an archive holds {MAX_MEMBERS} files of at most {MAX_SIZE} bytes",
            )
        with self._lock:
            old = self._members.get(check_key(key))
            if old is not None:
                if old.size != len(view) or self._read(old, old.size) != view:
                    raise self._unsupported()
                return
            header = pack_header(key, len(view))
            with _errors(self._path, "write"):
                start = _write(self._file, memoryview(header), self._end)
                after = _write(self._file, view, start)
                # A put that fails on its way is not counted: the next one writes over it.
                self._end = _write(self._file, memoryview(bytes(padding(len(view)))), after)
            self._members[key] = Member(key, start, len(view))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        found = self.get(key, MAX_SIZE).version if self.size(key) is not None else None
        if found == version:
            self.put(key, data)
        return found == version

    def delete(self, key: str) -> None:
        if check_key(key) in self._members:
            raise self._unsupported()

    def close(self) -> None:
        if self._file < 0:
            return
        try:
            with self._lock, _errors(self._path, "write"):
                os.ftruncate(self._file, _write(self._file, memoryview(END), self._end))
                os.fsync(self._file)
                os.replace(self._beside, self._path)
                _sync_folder(self._path.parent)
        except BaseException:
            self.abandon()
            raise
        super().close()

    def abandon(self) -> None:
        """Leave nothing; fine after `close`, too."""
        if self._file >= 0:
            super().close()
            with contextlib.suppress(OSError):
                self._beside.unlink()

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None or isinstance(exc[1], PartlyDone):
            self.close()
        else:
            self.abandon()


@contextlib.contextmanager
def _errors(path: Path, doing: str) -> Iterator[None]:
    """Turn OSErrors of the block into errors that name the archive."""
    try:
        yield
    except FileNotFoundError as error:
        if doing == "read":
            raise NotFound(f"there is no {path}", "check the path") from error
        raise RemoteError(f"cannot write {path}: no such folder", "make its folder") from error
    except OSError as error:
        raise RemoteError(
            f"cannot {doing} {path} ({error.strerror})",
            "check the disk's space and the file's mode",
        ) from error


def _write(file: int, data: memoryview, at: int) -> int:
    """Write all of it; where it ends."""
    while data:
        written = os.pwrite(file, data[:_MOST], at)
        data, at = data[written:], at + written
    return at


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot, and the file itself is safe
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(file)
        finally:
            os.close(file)
