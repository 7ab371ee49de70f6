"""A limit on operations at one time and on the time of each, whatever the backend does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from kvsnap.formats.errors import RemoteDown, RemoteError
from kvsnap.kvstore.remotes.base import Buffer, Entry, Object, Options, Remote
from kvsnap.kvstore.remotes.wrapped import Wrapped

PAGE = 1000
"""Entries of a listing that one hop to a thread fetches: as many as object stores send at once."""
MOST_ENTRIES = 2**23
"""Blocks of 40 TB, as a rule. A hostile server may go on for ever."""
HUNG_PER_SLOT = 4
_Done = TypeVar("_Done")


class Limited(Wrapped):
    """Each operation runs in a thread of its own, which is left behind if it does not come back in
    time: `RemoteDown` then, and its place is free for the next. Such threads are daemons, so they
    never keep a process from ending. While more than `HUNG_PER_SLOT` times `at_once` of them hang,
    operations fail at once instead of adding to them.

    The time counts from the call on, waiting for a place included.
    """

    def __init__(self, remote: Remote, options: Options) -> None:
        super().__init__(remote)
        self._timeout = options.timeout
        self._places = threading.Semaphore(max(1, options.at_once))
        self._lock = threading.Lock()
        self._hung = 0
        self._most_hung = HUNG_PER_SLOT * max(1, options.at_once)

    def get(self, key: str, limit: int) -> Object:
        return self._run("get", key, lambda: self.remote.get(key, limit))

    def get_start(self, key: str, count: int) -> bytes:
        return self._run("get", key, lambda: self.remote.get_start(key, count))

    def size(self, key: str) -> int | None:
        return self._run("size", key, lambda: self.remote.size(key))

    def put(self, key: str, data: Buffer) -> None:
        # A copy: a put that hangs reads its data after the caller has it back, and may have
        # written other rows over it by then.
        own = bytes(data)
        self._run("put", key, lambda: self.remote.put(key, own))

    def replace(self, key: str, data: Buffer, version: str | None) -> bool:
        own = bytes(data)
        return self._run("replace", key, lambda: self.remote.replace(key, own, version))

    def delete(self, key: str) -> None:
        self._run("delete", key, lambda: self.remote.delete(key))

    def list(self, prefix: str) -> Iterator[Entry]:
        """The time counts for each page of the listing, from its first request on."""
        entries, count = self._run("list", prefix, lambda: self.remote.list(prefix)), 0
        while page := self._run("list", prefix, lambda: self._page(entries)):
            count += len(page)
            if count > MOST_ENTRIES:
                raise RemoteError(f"{self.url}: a listing of {prefix or 'it all'} does not end")
            yield from page

    def _page(self, entries: Iterator[Entry]) -> Sequence[Entry]:
        """The next entries; empty at the end. A slow listing gives what it has in half the time."""
        page = list[Entry]()
        end = time.monotonic() + self._timeout / 2
        for entry in entries:
            page.append(entry)
            if len(page) == PAGE or time.monotonic() >= end:
                break
        return page

    def _run(self, operation: str, key: str, work: Callable[[], _Done]) -> _Done:
        end = time.monotonic() + self._timeout
        with self._lock:
            hung = self._hung
        if hung >= self._most_hung:
            raise RemoteDown(
                f"{self.url}: {hung} earlier operations got no answer yet", "is the server up?"
            )
        with self._place(f"{operation} {key}", end):
            future = Future[_Done]()
            threading.Thread(
                target=_work_for, args=(future, work), name=f"remote {operation}", daemon=True
            ).start()
            done, _ = wait([future], max(0.0, end - time.monotonic()))
            if not done:
                self._leave(future)
                raise self._no_answer(f"{operation} {key}")
        return future.result()

    @contextlib.contextmanager
    def _place(self, what: str, end: float) -> Iterator[None]:
        if not self._places.acquire(timeout=max(0.0, end - time.monotonic())):
            raise self._no_answer(what)
        try:
            yield
        finally:
            self._places.release()

    def _leave(self, future: Future[_Done]) -> None:
        with self._lock:
            self._hung += 1
        future.add_done_callback(self._came_back)

    def _came_back(self, _: Future[_Done]) -> None:
        with self._lock:
            self._hung -= 1

    def _no_answer(self, what: str) -> RemoteDown:
        return RemoteDown(
            f"{self.url}: {what.strip()}: no answer within {self._timeout:g} s",
            "is the server up?",
        )


def _work_for(future: Future[_Done], work: Callable[[], _Done]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - the caller's, raised in its thread
        future.set_exception(error)
