"""Trying again what may pass: `RemoteDown`, and nothing else."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from kvsnap.formats.errors import Damaged, NotFound, RemoteDown
from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Options, Remote
from kvsnap.kvstore.remotes.wrapped import Wrapped

FIRST_WAIT = 0.1
LONGEST_WAIT = 2.0
"""Seconds. A request that waits longer than this should be computing instead."""
_Done = TypeVar("_Done")


class Retried(Wrapped):
    """Waits between tries grow twofold and are drawn from zero upwards ("full jitter"): machines
    that failed together do not come back together."""

    def __init__(
        self,
        remote: Remote,
        options: Options,
        sleep: Callable[[float], None] = time.sleep,
        draw: Callable[[float, float], float] = random.uniform,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(remote)
        self._tries = max(1, options.tries)
        self._patience, self._clock = options.timeout, clock
        self._sleep = sleep
        self._draw = draw

    def get(self, key: str, limit: int) -> Object:
        return self._again(lambda: self.remote.get(key, limit))

    def get_start(self, key: str, count: int) -> bytes:
        return self._again(lambda: self.remote.get_start(key, count))

    def size(self, key: str) -> int | None:
        return self._again(lambda: self.remote.size(key))

    def put(self, key: str, data: Buffer) -> None:
        self._again(lambda: self.remote.put(key, data))

    def delete(self, key: str) -> None:
        self._again(lambda: self.remote.delete(key))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        """A try that failed may have written all the same, and the next one is then told that
        another object stands there: it looks whether that is ours before it says so."""
        doubtful = False

        def once() -> bool:
            nonlocal doubtful
            if doubtful and self._stands(key, data):
                return True
            try:
                done = self.remote.replace(key, data, version)
            except RemoteDown:
                doubtful = True
                raise
            # The write of an earlier try may also arrive between the look and this one.
            return done or (doubtful and self._stands(key, data))

        return self._again(once)

    def list(self, prefix: str) -> Iterator[Entry]:
        """A listing that broke off is begun again and goes on behind what was handed out, if the
        same keys come first again; where they do not, some would be skipped or come twice, and
        `RemoteDown` stands."""
        handed_out = 0
        keys = hashlib.blake2b()
        failures, started = 0, self._clock()
        while True:
            entries = self.remote.list(prefix)
            try:
                again = hashlib.blake2b()
                for _ in range(handed_out):
                    entry = next(entries, None)
                    again.update((entry.key if entry else "").encode() + b"\n")
                if again.digest() != keys.digest():
                    raise RemoteDown(
                        f"{self.url}: the listing broke off, and the next one is another",
                        "try again while nobody else writes there",
                    )
                for entry in entries:
                    handed_out += 1
                    keys.update(entry.key.encode() + b"\n")
                    yield entry
                return
            except RemoteDown:
                failures += 1
                if failures >= self._tries or self._too_late(started):
                    raise
            self._wait(failures)

    def _again(self, work: Callable[[], _Done]) -> _Done:
        started = self._clock()
        for failures in range(1, self._tries):
            try:
                return work()
            except RemoteDown:
                if self._too_late(started):
                    raise
                self._wait(failures)
        return work()

    def _too_late(self, started: float) -> bool:
        return self._clock() - started >= self._patience

    def _wait(self, failures: int) -> None:
        longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(failures - 1, 16))
        self._sleep(self._draw(0.0, longest))

    def _stands(self, key: str, data: Buffer) -> bool:
        own = memoryview(data).cast("B")
        try:
            return self.remote.get(key, len(own)).data == own
        except (NotFound, Damaged):  # Damaged: longer, and so another one
            return False
