"""A remote in memory: the fake for tests that are about something else, and the suite's plainest
candidate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kvsnap.kvstore.remotes.base import (
    Buffer,
    Entry,
    Object,
    Remote,
    check_key,
    check_prefix,
    no_object,
    too_long,
)


class MemoryRemote(Remote):
    """Objects in a dict behind a lock. `objects` may be looked at, and changed, by a test."""

    def __init__(self, name: str = "test", clock: Callable[[], float] = time.time) -> None:
        self.url = f"memory://{name}"
        self.objects: dict[str, Object] = {}
        self.changed: dict[str, float] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._writes = 0

    def get(self, key: str, limit: int) -> Object:
        with self._lock:
            found = self.objects.get(check_key(key))
        if found is None:
            raise no_object(key)
        if len(found.data) > limit:
            raise too_long(key, limit)
        return found

    def size(self, key: str) -> int | None:
        with self._lock:
            found = self.objects.get(check_key(key))
        return None if found is None else len(found.data)

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self._store(check_key(key), bytes(data))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        with self._lock:
            found = self.objects.get(check_key(key))
            if (None if found is None else found.version) != version:
                return False
            self._store(key, bytes(data))
        return True

    def list(self, prefix: str) -> Iterator[Entry]:
        check_prefix(prefix)
        with self._lock:
            entries = [
                Entry(key, len(found.data), self.changed.get(key, 0.0))
                for key, found in self.objects.items()
                if key.startswith(prefix)
            ]
        yield from entries

    def delete(self, key: str) -> None:
        with self._lock:
            self.objects.pop(check_key(key), None)
            self.changed.pop(key, None)

    def _store(self, key: str, data: bytes) -> None:
        self._writes += 1
        self.objects[key] = Object(data, str(self._writes))
        self.changed[key] = self._clock()
