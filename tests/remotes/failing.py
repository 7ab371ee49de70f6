"""Remotes in memory that fail or hang when they are told to, and one call of each operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from kvsnap.formats.errors import (
    KvsnapError,
    RemoteDown,
)
from kvsnap.kvstore.remotes.base import Buffer, Entry, Object
from kvsnap.kvstore.remotes.wrapped import Wrapped
from kvsnap.testing.memory_remote import MemoryRemote

KEY = "blocks/ab/one"
OPERATIONS: dict[str, Callable[[Wrapped], object]] = {
    "get": lambda remote: remote.get(KEY, 100),
    "get_start": lambda remote: remote.get_start(KEY, 2),
    "size": lambda remote: remote.size(KEY),
    "put": lambda remote: remote.put(KEY, b"more"),
    "replace": lambda remote: remote.replace(KEY, b"more", "1"),
    "delete": lambda remote: remote.delete(KEY),
    "list": lambda remote: list(remote.list("blocks/")),
}


class Failing(Wrapped):
    """Raises the queued errors, one an operation, before it does what it is asked; an error in
    `after` is raised once the operation is done."""

    def __init__(self, *errors: KvsnapError, after: bool = False) -> None:
        super().__init__(MemoryRemote(clock=lambda: 1.0))
        self.remote.put(KEY, b"data")
        self.errors = list(errors)
        self.after = after
        self.asked = 0

    def _maybe(self, work: Callable[[], object]) -> object:
        self.asked += 1
        error = self.errors.pop(0) if self.errors else None
        if error and not self.after:
            raise error
        done = work()
        if error:
            raise error
        return done

    def get(self, key: str, limit: int) -> Object:
        return self._maybe(lambda: self.remote.get(key, limit))

    def get_start(self, key: str, count: int) -> bytes:
        return self._maybe(lambda: self.remote.get_start(key, count))

    def size(self, key: str) -> int | None:
        return self._maybe(lambda: self.remote.size(key))

    def put(self, key: str, data: Buffer) -> None:
        self._maybe(lambda: self.remote.put(key, data))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        return self._maybe(lambda: self.remote.replace(key, data, version))

    def delete(self, key: str) -> None:
        self._maybe(lambda: self.remote.delete(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        yield from self._maybe(lambda: list(self.remote.list(prefix)))


class Hanging(Wrapped):
    """Hangs until it is let go of, in the operations on keys that contain `hang`."""

    def __init__(self) -> None:
        super().__init__(MemoryRemote())
        self.let_go = threading.Event()
        self.seen: list[bytes] = []
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()

    def get(self, key: str, limit: int) -> Object:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if "hang" in key:
            self.let_go.wait(30)
        else:
            time.sleep(0.002)
        with self._lock:
            self.at_once -= 1
        return self.remote.get(key, limit)

    def put(self, key: str, data: Buffer) -> None:
        self.let_go.wait(30)
        self.seen.append(bytes(data))

    def list(self, prefix: str) -> Iterator[Entry]:
        yield from self.remote.list(prefix)
        self.let_go.wait(30)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def down() -> RemoteDown:
    return RemoteDown("503")
