"""What would be written, without writing it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from kvsnap.formats.errors import NotFound
from kvsnap.kvstore.remotes.base import Buffer, Remote
from kvsnap.kvstore.remotes.wrapped import Wrapped


@dataclass(frozen=True)
class Write:
    """A write that was left out: `operation` is put, replace or delete; `size` in bytes."""

    operation: str
    key: str
    size: int = 0


class DryRun(Wrapped):
    """Reads pass; writes do nothing but stand in `writes`, in their order. What was left out is not
    seen by later reads."""

    def __init__(self, remote: Remote) -> None:
        super().__init__(remote)
        self.writes: list[Write] = []
        self._lock = threading.Lock()

    @property
    def bytes_out(self) -> int:
        """Bytes that would have been sent."""
        with self._lock:
            return sum(write.size for write in self.writes)

    def put(self, key: str, data: Buffer) -> None:
        self._note(Write("put", key, memoryview(data).nbytes))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        try:
            found: str | None = self.remote.get(key, 2**31).version
        except NotFound:
            found = None
        if found != version:
            return False
        self._note(Write("replace", key, memoryview(data).nbytes))
        return True

    def delete(self, key: str) -> None:
        self._note(Write("delete", key))

    def _note(self, write: Write) -> None:
        with self._lock:
            self.writes.append(write)
