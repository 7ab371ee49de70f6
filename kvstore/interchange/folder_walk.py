"""What stands in somebody else's folder, without leaving it: names and lengths, and first bytes on request.

Links are counted and not followed, also not while a folder is exchanged for one: each part of a path is
opened below the one before. Nothing is opened but regular files, so a FIFO cannot hold anybody up.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.formats.interchange.safetensors_file import MAX_HEADER

MOST_FILES = 200_000
"""Names of so many take 60 MB."""
DEEPEST = 8
"""Folders below one another; vLLM's fs tier has four."""
HEAD = 4096
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Found:
    """A regular file: its path below the folder's parent (the folder's own name stands before), length,
    and whether it can be read."""

    path: str
    size: int
    readable: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass
class Contents:
    """`others`: neither files, folders nor links. `closed`: folders that cannot be looked into. `more`:
    whether the folder holds more than was looked at."""

    root: Path
    files: list[Found] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    more: bool = False

    @property
    def count(self) -> int:
        """Of everything but folders."""
        return len(self.files) + len(self.links) + len(self.others) + len(self.closed)

    def open(self, found: Found) -> int:
        """A handle of a file, for the caller to close. Raises OSError, also where it is no regular file
        any more."""
        parts = found.path.split("/")[1:]
        handle = os.open(self.root, _FOLDER)
        try:
            for part in parts[:-1]:
                below = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = below
            file = os.open(parts[-1], _FILE, dir_fd=handle)
        finally:
            os.close(handle)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(0, "no regular file")
        return file

    def head(self, found: Found) -> memoryview:
        """The first bytes of a file, as many as say what it is: of safetensors all of the header. Empty
        where it cannot be read."""
        with contextlib.suppress(OSError), os.fdopen(self.open(found), "rb", buffering=0) as file:
            data = file.read(HEAD)
            if len(data) == HEAD and data[8:9] == b"{":
                (size,) = struct.unpack_from("<Q", data)
                if HEAD - 8 < size <= MAX_HEADER:
                    data += file.read(size + 8 - HEAD)
            return memoryview(data)
        return memoryview(b"")

    def whole(self, found: Found, limit: int) -> memoryview | None:
        """All bytes of a file; None where they are more than `limit`, or than memory has. Raises
        OSError."""
        with os.fdopen(self.open(found), "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                return None
            try:
                buffer = np.empty(size, np.uint8).data.cast("B")
            except MemoryError:
                return None
            at = 0
            while at < size:
                count = file.readinto(buffer[at:])
                if not count:
                    break
                at += count
            return buffer[:at]


def walk(folder: Path) -> Contents:
    """Raises `NotFound` or `UsageError` where there is no folder to look into."""
    contents = Contents(folder)
    try:
        handle = os.open(folder, _FOLDER)
    except NotADirectoryError as error:
        raise UsageError(f"{folder} is no folder", "name the folder that it is in") from error
    except OSError as error:
        raise NotFound(f"cannot look into {folder}: {error.strerror}", "check the path") from error
    _into(contents, handle, folder.resolve().name, DEEPEST)
    contents.files.sort(key=lambda found: found.path)
    return contents


def _into(contents: Contents, handle: int, above: str, deeper: int) -> None:
    try:
        with os.scandir(handle) as entries:
            for entry in _until_enough(contents, entries):
                path = f"{above}/{entry.name}"
                try:
                    _one(contents, handle, entry, path, deeper)
                except OSError:  # it went meanwhile, or its folder cannot be searched
                    contents.closed.append(path)
    except OSError:
        contents.closed.append(above)
    finally:
        os.close(handle)


def _until_enough(
    contents: Contents, entries: Iterator[os.DirEntry[str]]
) -> Iterator[os.DirEntry[str]]:
    for entry in entries:
        if contents.count >= MOST_FILES:
            contents.more = True
            return
        yield entry


def _one(contents: Contents, handle: int, entry: os.DirEntry[str], path: str, deeper: int) -> None:
    if entry.is_symlink():
        contents.links.append(path)
    elif entry.is_dir(follow_symlinks=False):
        if not deeper:
            contents.more = True
            return
        below = os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=handle)
        _into(contents, below, path, deeper - 1)
    elif entry.is_file(follow_symlinks=False):
        size = entry.stat(follow_symlinks=False).st_size
        readable = os.access(entry.name, os.R_OK, dir_fd=handle)
        contents.files.append(Found(path, size, readable))
    else:
        contents.others.append(path)
