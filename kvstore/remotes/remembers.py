"""A short memory of failure: a dead remote costs a reader one timeout, not one a block."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvsnap.formats.errors import NotFound, RemoteDown
from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Remote, no_object
from kvsnap.kvstore.remotes.wrapped import Wrapped

SECONDS = 30.0
MOST_KEYS = 4096
_Done = TypeVar("_Done")


class Remembers(Wrapped):
    """After a `RemoteDown` every operation fails at once for `seconds`, unless one that was under
    way still succeeds in moving an object. The key it failed for is refused for the whole time
    even then: a server may be up and hang on one object only.

    An object that a read did not find is not there for `seconds`, whatever a listing or `size` say
    (they may speak of one whose data is gone); `put` ends that. `size` alone finding nothing is not
    remembered, so that what others push is seen. A failure never changes what is known of a key.
    """

    def __init__(
        self,
        remote: Remote,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(remote)
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._why = ""
        self._down_until = 0.0
        self._failed: dict[str, float] = {}
        self._missing: dict[str, float] = {}

    def get(self, key: str, limit: int) -> Object:
        return self._read(key, lambda: self.remote.get(key, limit))

    def get_start(self, key: str, count: int) -> bytes:
        return self._read(key, lambda: self.remote.get_start(key, count))

    def size(self, key: str) -> int | None:
        if self._within(self._missing, key):
            return None
        self._refuse(key)
        return self._watch(key, lambda: self.remote.size(key))

    def put(self, key: str, data: Buffer) -> None:
        self._refuse(key)
        self._watch(key, lambda: self.remote.put(key, data))
        self._forget(key)

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        self._refuse(key)
        done = self._watch(key, lambda: self.remote.replace(key, data, version))
        if done:
            self._forget(key)
        return done

    def delete(self, key: str) -> None:
        self._refuse(key)
        self._watch(key, lambda: self.remote.delete(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        self._refuse("")
        try:
            yield from self.remote.list(prefix)
        except RemoteDown as error:
            self._note("", error)
            raise

    def _read(self, key: str, work: Callable[[], _Done]) -> _Done:
        if self._within(self._missing, key):
            raise no_object(key)
        self._refuse(key)
        try:
            found = self._watch(key, work)
        except NotFound:
            with self._lock:
                self._keep(self._missing, key)
            raise
        self._forget(key)
        return found

    def _watch(self, key: str, work: Callable[[], _Done]) -> _Done:
        try:
            return work()
        except RemoteDown as error:
            self._note(key, error)
            raise

    def _note(self, key: str, error: RemoteDown) -> None:
        with self._lock:
            self._why = error.what
            self._down_until = self._clock() + self._seconds
            self._keep(self._failed, key)

    def _forget(self, key: str) -> None:
        """An object came or went: the remote is up, and this key is there."""
        with self._lock:
            self._down_until = 0.0
            self._failed.pop(key, None)
            self._missing.pop(key, None)

    def _refuse(self, key: str) -> None:
        with self._lock:
            until = self._down_until
        if self._clock() < until or self._within(self._failed, key):
            raise RemoteDown(
                f"not asked again within {self._seconds:g} s of a failure: {self._why}",
                "what is missing is computed meanwhile",
            )

    def _within(self, memory: dict[str, float], key: str) -> bool:
        with self._lock:
            return self._clock() < memory.get(key, 0.0)

    def _keep(self, memory: dict[str, float], key: str) -> None:
        """The oldest leaves a full memory: it is the next to run out in any case."""
        memory.pop(key, None)
        if len(memory) >= MOST_KEYS:
            del memory[next(iter(memory))]
        memory[key] = self._clock() + self._seconds
