"""Threads that share a session or an engine: calls wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids


class Watched(StampedEngine):
    """Counts how often two threads are in it at once."""

    def __init__(self) -> None:
        super().__init__(batch=64)
        self.inside: set[int] = set()
        self.overlaps = self.calls = 0

    @contextmanager
    def _alone(self) -> Iterator[None]:
        me = threading.get_ident()
        if me in self.inside:
            yield
            return
        self.calls += 1
        self.overlaps += bool(self.inside)
        self.inside.add(me)
        threading.Event().wait(0.0005)  # let others run here
        yield
        self.inside.discard(me)

    def export(self, *args: Any) -> Any:
        with self._alone():
            return super().export(*args)

    def load(self, *args: Any) -> None:
        with self._alone():
            super().load(*args)

    def truncate(self, *args: Any) -> None:
        with self._alone():
            super().truncate(*args)


def test_calls_of_many_threads_on_one_engine_do_not_overlap(store: Store) -> None:
    engine = Watched()
    engine.evaluate(some_ids(100))
    sessions = [Session(store, engine, None), Session(store, engine, None)]
    sessions[0].save()

    def use(number: int) -> None:
        session = sessions[number % 2]
        session.resume(some_ids(20 + 10 * (number % 8)), leave=0)
        session.put_filled()
        (session.save_soon if number % 3 else session.save)()
        session.flush()

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(use, range(36)))
    assert engine.calls > 36
    assert engine.overlaps == 0
    engine.check_rows()
    for session in sessions:
        session.close()


def test_saves_of_one_session_by_many_threads_are_versions_of_it(store: Store) -> None:
    engine = StampedEngine(batch=64)
    engine.evaluate(some_ids(40))
    session = Session(store, engine, "chat")

    def save(number: int) -> None:
        (session.save_soon if number % 2 else session.save)({"number": number})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(24)))
    session.close()
    assert store.sessions.load("default", "chat").record.revision == 24
    assert [item.facts.name for item in store.listing] == ["chat"]
