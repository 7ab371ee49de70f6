"""The files of another tool on disk: one file, or a folder with what belongs to it."""

from __future__ import annotations

import stat
from pathlib import Path

from blake3 import blake3

from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.formats.interchange.foreign import Files
from kvsnap.kvstore.files import read_whole

MAX_FILES = 100_000
"""Pages of one sequence; a folder with more holds many sequences, and cannot be read as one."""

MAX_BYTES = 2**40
"""Of one file; what memory holds decides."""


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


def gather(path: Path) -> Files:
    """Every file under `path` by its relative path, read whole; a file by its name. A folder's own
    name stands before them: some tools put a hash there. Links are not followed."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            if not path.is_file():
                raise UsageError(
                    f"{path} is not a regular file", "give a file, or a folder of files"
                )
            return {path.name: read_whole(path.resolve(), limit=MAX_BYTES)}
        found: dict[str, memoryview] = {}
        folder = path.resolve()
        for each in sorted(folder.rglob("*")):
            if each.is_symlink() or not each.is_file():
                continue
            if len(found) == MAX_FILES:
                raise UsageError(
                    f"{path} holds more than {MAX_FILES} files", "give the folder of one sequence"
                )
            data = read_whole(each, limit=MAX_BYTES)
            found[each.relative_to(folder.parent).as_posix()] = data
    except MemoryError as error:
        raise NotFound(
            f"{path} does not fit into memory", "import it on a larger machine"
        ) from error
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", "check the path") from error
    return found


def digest_of(files: Files) -> str:
    """BLAKE3 over names, lengths and contents, in the order of the names."""
    hasher = blake3()
    for name in sorted(files):
        hasher.update(f"{len(name.encode())}:{name}:{len(files[name])}:".encode())
        hasher.update(files[name])
    return hasher.hexdigest()
