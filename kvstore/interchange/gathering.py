"""The files of another tool on disk: one file, or a folder with what belongs to it, read when asked for."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvsnap.formats.errors import NotFound, Unsupported, UsageError
from kvsnap.kvstore.files import read_whole

MAX_FILES = 1_000_000
"""Pages of all prompts of a server."""
MAX_BYTES = 2**40
"""Of one file; what memory holds decides."""
HEAD = 2**20
"""Bytes that a format is recognised by: a safetensors header of 100 layers has a twentieth of them."""


class OnDisk(Mapping[str, memoryview]):
    """Every file under a folder by its relative path, or one file by its name. A folder's own name stands
    before them: some tools put a hash there. Links inside of it are not followed.

    A content is read when it is asked for: of a server's folder one prompt needs few files. Raises
    `NotFound` for what cannot be read, `Damaged` for what changes meanwhile.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._paths = dict(_files(path))
        except OSError as error:
            raise _unreadable(path, error) from error

    def __getitem__(self, name: str) -> memoryview:
        path = self._paths[name]
        try:
            return read_whole(path, limit=MAX_BYTES)
        except MemoryError as error:
            raise NotFound(
                f"{path} does not fit into memory", "import it on a larger machine"
            ) from error
        except OSError as error:
            raise _unreadable(path, error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def heads(self) -> Mapping[str, memoryview]:
        """The first bytes of each, for whoever recognises them."""
        return _Heads(self._paths)


class _Heads(Mapping[str, memoryview]):
    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> memoryview:
        try:
            with self._paths[name].open("rb") as file:
                return memoryview(file.read(HEAD))
        except OSError as error:
            raise _unreadable(self._paths[name], error) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def is_portable(path: Path) -> bool:
    """Whether a path is what `kvsnap export` writes: a tar file. What is not there counts as one, for
    the error that it gets."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for a writer
            return False
        with path.open("rb") as file:
            return file.read(263)[257:] == b"ustar\0"
    except OSError:
        return True


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not stat.S_ISDIR(path.stat().st_mode):
        if not path.is_file():
            raise Unsupported(f"{path} is no regular file", "give a file, or a folder of files")
        yield path.name, path.resolve()
        return
    folder = path.resolve()
    for number, each in enumerate(sorted(folder.rglob("*"))):
        if number == MAX_FILES:
            raise UsageError(
                f"{path} holds more than {MAX_FILES} files", "give the folder of one prompt"
            )
        if not each.is_symlink() and each.is_file():
            yield each.relative_to(folder.parent).as_posix(), each


def _unreadable(path: Path, error: OSError) -> NotFound:
    return NotFound(f"cannot read {path}: {error.strerror}", "check the path")
