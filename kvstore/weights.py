"""Digests of model files, remembered: a second start must not read a model again.

A digest is believed without reading as long as device, inode, size, mtime and ctime are the same,
and it is remembered only where both times lie more than 2 s before hashing began: within the
clock's grain a file can change twice without its times telling (git's racy rule).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvsnap.formats.errors import EngineError, NotFound
from kvsnap.kvstore.index import Index

RACY_SECONDS = 2
_CHUNK = 16 * 2**20


class FileDigests:
    """`blake3:HEX` of files. `progress(done, total)` is called in bytes while one is read."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self._known: dict[str, tuple[str, str]] = {}
        self.progress: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, path: Path) -> str:
        key = path.resolve()
        try:
            before = key.stat()
            stamp = stamp_of(before)
            known = self._known.get(str(key)) or self._stored(str(key))
            if known is not None and known[1] == stamp:
                return known[0]
            started = time.time_ns()
            digest = f"blake3:{self._hash(key, before.st_size)}"
            if stamp_of(key.stat()) != stamp:
                raise EngineError(f"{path} changed while it was read", "try again")
        except OSError as error:
            raise NotFound(f"cannot read {path}: {error.strerror}", "check the path") from error
        if started - max(before.st_mtime_ns, before.st_ctime_ns) > RACY_SECONDS * 10**9:
            self._remember(str(key), stamp, digest)
        return digest

    def _hash(self, path: Path, size: int) -> str:
        hasher = blake3(max_threads=blake3.AUTO)
        done = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
                done += len(chunk)
                self.progress(done, size)
        return hasher.hexdigest()

    def _stored(self, path: str) -> tuple[str, str] | None:
        found = self.index.query("SELECT digest, stamp FROM weights WHERE path = ?", [path])
        return (str(found[0][0]), str(found[0][1])) if found else None

    def _remember(self, path: str, stamp: str, digest: str) -> None:
        self._known[path] = (digest, stamp)
        self.index.note(
            lambda db: db.execute(
                "INSERT INTO weights VALUES (?, ?, ?) ON CONFLICT(path) DO UPDATE SET"
                " stamp = excluded.stamp, digest = excluded.digest",
                (path, stamp, digest),
            ).close()
        )


def stamp_of(status: os.stat_result) -> str:
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, fields))
