"""Digests of model files, remembered: a second start must not read a model again.

A digest is believed without reading as long as device, inode, size, mtime and ctime are the same,
and it is remembered only where both times lie more than 2 s before hashing began: within the
clock's grain a file can change twice without its times telling (git's racy rule).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged, EngineError, KvsnapError, NotFound
from kvsnap.kvstore import files

RACY_SECONDS = 2
_CHUNK = 16 * 2**20
MOST_FILES = 1000
MOST_BYTES = 2**22


class FileDigests:
    """`blake3:HEX` of files. `progress(done, total)` is called in bytes while one is read."""

    def __init__(self, memo: Path | None = None) -> None:
        """`memo`: the file that they are remembered in. The user's own, not a store's: whoever may
        write to a store must not be able to give one model the blocks of another, and whoever reads an
        encrypted one not to see which models there are."""
        self.memo = memo if memo is not None else memo_path()
        self._known: dict[str, list[str]] = {}
        self.progress: Callable[[int, int], None] = lambda done, total: None

    def __call__(self, path: Path) -> str:
        key = path.resolve()
        try:
            before = key.stat()
            stamp = stamp_of(before)
            known = self._known.get(str(key)) or self._remembered().get(str(key))
            if known is not None and known[0] == stamp:
                return known[1]
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

    def _remembered(self) -> dict[str, list[str]]:
        """Path → [stamp, digest]; none where the file cannot be read."""
        try:
            found = json.loads(bytes(files.read_whole(self.memo, limit=MOST_BYTES)))
        except (OSError, ValueError, RecursionError, Damaged):
            return {}
        pairs = found.items() if isinstance(found, dict) else ()
        return {path: pair for path, pair in pairs if _is_pair(pair)}

    def _remember(self, path: str, stamp: str, digest: str) -> None:
        """Of two processes that write at once one's may be lost: its file is read once more."""
        self._known[path] = [stamp, digest]
        others = self._remembered()
        others.pop(path, None)
        newest = dict(list(others.items())[-(MOST_FILES - 1) :]) | {path: [stamp, digest]}
        data = json.dumps(newest).encode()
        temporary = self.memo.with_name(f"{self.memo.name}.{secrets.token_hex(8)}")
        with contextlib.suppress(OSError, KvsnapError):  # it costs time only
            files.write_file(temporary, Packed((data,), len(data), ""))
            temporary.replace(self.memo)


def memo_path() -> Path:
    """model-digests.json in the user's state folder."""
    from platformdirs import user_state_path

    return user_state_path("kvsnap", appauthor=False) / "model-digests.json"


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and [type(item) for item in value] == [str, str]


def stamp_of(status: os.stat_result) -> str:
    fields = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ":".join(map(str, fields))
