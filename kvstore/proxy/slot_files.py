"""Files in the folder that proxy and server share: random names, gone as soon as they were read.

A proxy that is killed leaves its files there. They have the name of a lock in the same folder, which ends
with its process: the next proxy removes those whose lock nobody holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from kvsnap.formats.errors import NotFound
from kvsnap.formats.layout import Array
from kvsnap.kvstore import files
from kvsnap.kvstore.locks import SUFFIX, Owner, is_locked

_OURS = re.compile(r"kvsnap-([0-9a-f]{16})-[0-9a-f]{16}\.slot(\.tmp)?")
_LOCK = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}")


class SlotFiles:
    """The slot files of one proxy in `folder`, which is the server's --slot-save-path."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise NotFound(
                f"no folder {folder}", "give the server's --slot-save-path with --slot-dir"
            )
        self.folder = folder
        self._owner = Owner(folder)
        self._remove_leftovers()

    @contextlib.contextmanager
    def name(self) -> Iterator[str]:
        """A name for one file, which is gone at the end, whoever wrote it."""
        name = f"kvsnap-{self._owner.id}-{secrets.token_hex(8)}.slot"
        try:
            yield name
        finally:
            self._unlink(self.folder / name)
            self._unlink(self.folder / f"{name}.tmp")

    def write(self, name: str, buffer: Array) -> None:
        """Write a whole file; the server aborts on a part of one, so it gets its name at the end."""
        path, whole = self.folder / f"{name}.tmp", memoryview(buffer.data).cast("B")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while whole:
                whole = whole[os.write(handle, whole) :]
        finally:
            os.close(handle)
        path.rename(self.folder / name)

    def read(self, name: str) -> memoryview:
        """Raises `OSError`; `FileNotFoundError` where the server wrote into another folder."""
        return files.read_whole(self.folder / name)

    def close(self) -> None:
        for path in self.folder.glob(f"kvsnap-{self._owner.id}-*"):
            self._unlink(path)
        self._owner.release()

    def _remove_leftovers(self) -> None:
        alive: dict[str, bool] = {}
        for path in sorted(self.folder.iterdir(), reverse=True):  # kvsnap-… before its lock
            found = _OURS.fullmatch(path.name) or _LOCK.fullmatch(path.name)
            if found is None:
                continue
            lock = self.folder / f"{found[1]}{SUFFIX}"
            if not alive.setdefault(found[1], is_locked(lock)):
                self._unlink(path)

    @staticmethod
    def _unlink(path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
