"""What one tenant's process does and is told: every answer, every statement and file of the store, every
request to a remote, with all masked that differs between any two runs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore.events import METRICS
from tests.remotes.proxy import FaultyProxy, Request
from tests.tenants import shown

_FILES = ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir", "os.link")
_HEX = re.compile(r"[0-9a-f]{8,}", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CONNECTING = ("PRAGMA", "SELECT 1 FROM", "-- ")
"""How many threads of a pool open a connection of their own is chance."""
_ELSEWHERE = ("seconds", "path", "remote", "file", "created", "creator", "version", "changed")
"""Fields of answers that are another time or place in each world."""


@dataclass
class Seen:
    """One step. Threads work on several files at once, so what they do is sorted."""

    answer: Any = None
    store: list[str] = field(default_factory=list)
    remote: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    """What the metrics of the process rose by; of durations, how often one was taken."""


class Watch:
    """Records a world's steps. `places`: its folder, and its prefix with the bucket and without."""

    def __init__(self, proxy: FaultyProxy, *places: str) -> None:
        self.proxy, self.places = proxy, places
        self.unmasked: list[str] = []
        """All of it, as it was."""
        self._now: Seen | None = None
        self._lock = threading.Lock()

    def step(self, does: Callable[[], Any]) -> Seen:
        self.proxy.forget()
        self._now = seen = Seen()
        before = _counts()
        with _on(self):
            try:
                found = does()
                self.unmasked.append(repr(found))
                seen.answer = self._plain(found)
            except KvsnapError as error:
                self.unmasked.append(shown(error))
                seen.answer = [type(error).__name__, self._mask(error.what), self._mask(error.hint)]
        seen.counted = dict(_counts() - before)
        self.unmasked += seen.counted
        seen.store.sort()
        with self.proxy.lock:
            self.unmasked += [request.path for request in self.proxy.requests]
            seen.remote = sorted(map(self._request, self.proxy.requests))
        return seen

    def _request(self, request: Request) -> str:
        # The body of an error has a request id of any length in it. And before a push in the clear the
        # whole remote is listed, to refuse what another tenant could read.
        open_to_all = request.path.endswith("prefix=" + quote(f"{self.places[2]}/manifests/", ""))
        received = 0 if open_to_all or request.status >= 400 else request.received
        path = self._mask(request.path)
        return f"{request.method} {path} {request.status}, sent {request.sent}, received {received}"

    def file(self, event: str, path: object) -> None:
        text = str(path)
        if isinstance(path, str | Path) and text.startswith(self.places[0]):
            self._note(event, text)

    def statement(self, sql: str) -> None:
        if not sql.startswith(_CONNECTING):
            self._note("sql", sql)

    def _note(self, event: str, what: str) -> None:
        assert self._now is not None
        with self._lock:
            self.unmasked.append(what)
            self._now.store.append(f"{event} {_NUMBER.sub('#', self._mask(what))}")

    def _mask(self, text: str) -> str:
        for place in self.places:
            text = text.replace(place, "PLACE")
        return _HEX.sub("#", text)

    def _plain(self, value: Any) -> Any:
        """An answer without times and places."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {k: self._plain(v) for k, v in value.items() if k not in _ELSEWHERE}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        return self._mask(value) if isinstance(value, str) else value


def start() -> None:
    """Before the first store is opened. An audit hook stays until the process ends."""
    if not _started:
        _started.append(True)
        sys.addaudithook(_hook)


def parted(one: dict[str, Seen], other: dict[str, Seen]) -> str:
    """Where the same steps in two worlds differ first; empty for nowhere."""
    assert one.keys() == other.keys()
    for step, seen in one.items():
        for what in ("answer", "store", "remote", "counted"):
            here, there = getattr(seen, what), getattr(other[step], what)
            if here != there:
                return (
                    f"{step}, {what}:\n{_only(here, there)}\n--- instead of\n{_only(there, here)}"
                )
    return ""


def _only(value: Any, other: Any) -> str:
    if not (isinstance(value, list) and isinstance(other, list)):
        return json.dumps(value, default=str)
    lines = Counter(map(str, value)) - Counter(map(str, other))
    return "\n".join(f"{count} x {line}" for line, count in sorted(lines.items()))


def _counts() -> Counter[str]:
    found = Counter[str]()
    for metric in METRICS:
        for series, value in metric.read().items():
            number = value if isinstance(value, int) else value.counts[-1]
            found[" ".join((metric.name, *series))] = number
    return found


_started: list[bool] = []
_watching: list[Watch] = []


@contextlib.contextmanager
def _on(watch: Watch) -> Iterator[None]:
    connect = sqlite3.connect

    def traced(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*arguments, **options)
        connection.set_trace_callback(watch.statement)
        return connection

    _watching.append(watch)
    with mock.patch.object(sqlite3, "connect", traced):
        try:
            yield
        finally:
            _watching.remove(watch)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _FILES:
        for watch in _watching:
            watch.file(event, arguments[0])
