"""Counting what a remote is asked for, for metrics and for tests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from kvsnap.formats.errors import KvsnapError, NotFound
from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Remote
from kvsnap.kvstore.remotes.wrapped import Wrapped


@dataclass
class Call:
    """One operation: its name, the seconds it took, the payload bytes that came in and went out,
    and the class name of its error ("" for none; `NotFound` is an answer and no error)."""

    operation: str
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    error: str = ""


@dataclass
class Count:
    """The calls of one operation, added up. `errors` are counted by class name."""

    calls: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    errors: dict[str, int] = field(default_factory=dict)


class Counted(Wrapped):
    """Counts by operation: get, get_start, size, put, replace, list, delete. A listing is one call,
    from its first entry to its last. `told` hears of every call, in the thread that made it."""

    def __init__(
        self,
        remote: Remote,
        told: Callable[[Call], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(remote)
        self._told = told
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, Count] = {}

    def counts(self) -> dict[str, Count]:
        """What was counted up to now, by operation; a copy."""
        with self._lock:
            return {
                name: replace(count, errors=dict(count.errors))
                for name, count in self._counts.items()
            }

    def calls(self, operation: str) -> int:
        with self._lock:
            return self._counts.get(operation, Count()).calls

    @property
    def bytes_in(self) -> int:
        return sum(count.bytes_in for count in self.counts().values())

    @property
    def bytes_out(self) -> int:
        return sum(count.bytes_out for count in self.counts().values())

    def get(self, key: str, limit: int) -> Object:
        with self._call("get") as call:
            found = self.remote.get(key, limit)
            call.bytes_in = len(found.data)
        return found

    def get_start(self, key: str, count: int) -> bytes:
        with self._call("get_start") as call:
            found = self.remote.get_start(key, count)
            call.bytes_in = len(found)
        return found

    def size(self, key: str) -> int | None:
        with self._call("size"):
            return self.remote.size(key)

    def put(self, key: str, data: Buffer) -> None:
        with self._call("put") as call:
            self.remote.put(key, data)
            call.bytes_out = memoryview(data).nbytes

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        with self._call("replace") as call:
            done = self.remote.replace(key, data, version)
            call.bytes_out = memoryview(data).nbytes if done else 0
        return done

    def list(self, prefix: str) -> Iterator[Entry]:
        with self._call("list"):
            yield from self.remote.list(prefix)

    def delete(self, key: str) -> None:
        with self._call("delete"):
            self.remote.delete(key)

    @contextlib.contextmanager
    def _call(self, operation: str) -> Iterator[Call]:
        call = Call(operation)
        began = self._clock()
        try:
            yield call
        except NotFound:
            raise
        except KvsnapError as error:
            call.error = type(error).__name__
            raise
        finally:
            call.seconds = self._clock() - began
            self._add(call)
            if self._told is not None:
                self._told(call)

    def _add(self, call: Call) -> None:
        with self._lock:
            count = self._counts.setdefault(call.operation, Count())
            count.calls += 1
            count.seconds += call.seconds
            count.bytes_in += call.bytes_in
            count.bytes_out += call.bytes_out
            if call.error:
                count.errors[call.error] = count.errors.get(call.error, 0) + 1
