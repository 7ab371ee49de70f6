"""SIGKILL at any moment of a save within a budget, of gc, of a pin and of a replaced session."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine

CHILD = Path(__file__).parents[1] / "stress_child.py"
CAPACITY = 90_000
ROUNDS = 35
LONGEST_LIFE = 0.12
"""Seconds from its first line to the kill: some tens of saves, on a fast machine."""


class Server:
    """Imports once and forks what is killed."""

    def __init__(self, store: Path) -> None:
        command = [sys.executable, "-W", "error", str(CHILD), "serve", str(store), str(CAPACITY)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.running = 0
        """The id of the process that was begun last, until its end."""

    def begin(self, loop: str, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{loop} {seed}\n")
        self.process.stdin.flush()

    def lines_until_killed(self, loop: str, seed: int, seconds: float) -> list[dict[str, Any]]:
        """What a process said before it was killed, `seconds` after its first line."""
        self.begin(loop, seed)
        lines = [self.line(), self.line()][1:]
        time.sleep(seconds)
        os.kill(self.running, signal.SIGKILL)
        while "ended" not in lines[-1]:
            lines.append(self.line())
        assert lines.pop() == {"ended": -signal.SIGKILL}, "it failed by itself"
        return lines

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.running = 0 if "ended" in said else said.get("pid", self.running)
        return said

    def close(self) -> None:
        if self.running:
            os.kill(self.running, signal.SIGKILL)
        self.process.communicate(timeout=60)


@pytest.fixture
def server(store_path: Path) -> Iterator[Server]:
    made = Server(store_path)
    yield made
    made.close()


def open_store(path: Path) -> Store:
    return Store(path, capacity=CAPACITY, min_free="0")


def assert_sessions(store: Store, said: dict[str, list[int]]) -> None:
    """Token ids and tail of whatever was reported saved are there; evicted blocks are computed."""
    for name, ids in said.items():
        engine = StampedEngine(capacity=300)
        session = Session(store, engine, name)
        stored = session.stored_token_ids()
        if stored.tolist() != ids:
            continue  # the save that was under way got through, unreported
        report = session.resume(stored, leave=0)
        assert report.damage == ()
        front = next(entry for entry in store.listing if entry.facts.name == name).stored_blocks
        whole = front == len(ids) // store.block_size
        assert report.reused_tokens >= (len(ids) if whole else front * store.block_size)
        engine.evaluate(stored[report.reused_tokens :])
        engine.check_rows()


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["save", "gc", "pin", "replace"])
def test_a_kill_leaves_a_clean_store_with_all_that_was_reported(
    server: Server, store_path: Path, loop: str
) -> None:
    chosen, said, evicted = random.Random(loop), dict[str, list[int]](), 0
    for number in range(ROUNDS):
        lines = server.lines_until_killed(loop, number, chosen.uniform(0, LONGEST_LIFE))
        said |= {line["name"]: line["ids"] for line in lines if "name" in line}
        with open_store(store_path) as store:
            report = verify_store(store)
            assert (report.bad, report.unreachable) == ([], [])
            assert disk_bytes(store.place) <= CAPACITY
            _assert_pinned(store, lines)
            assert_sessions(store, said)
            gc(store)
            assert_counts(store)
            for path in store.place.temporary.iterdir():
                os.utime(path, (1, 1))  # else what the killed ones left fills the store in an hour
            gc(store)
            assert not list(store.place.temporary.glob("*.part"))
            ((counted,),) = store.index.query(
                "SELECT value FROM counters WHERE name = 'evicted_blocks'"
            )
            evicted = max(evicted, counted)
            assert_closed(store)
            assert_counts(store)
            report = verify_store(store)
            assert (report.bad, report.unreachable) == ([], [])
        if number % 7 == 6:
            _with_a_new_index(store_path)
    assert evicted or loop == "replace", "nothing was ever evicted"


def _assert_pinned(store: Store, lines: list[dict[str, Any]]) -> None:
    """What was reported pinned is, and is whole; it is unpinned for the next round."""
    pinned = {entry.facts.name: entry for entry in store.listing if entry.pinned_until is not None}
    assert "pinned" not in lines[-1] or lines[-1]["pinned"] in pinned
    for name, entry in pinned.items():
        assert entry.stored_blocks == entry.facts.blocks
        store.pins.unpin_session(entry.path.parent.name, str(name))


def _with_a_new_index(path: Path) -> None:
    """What the files say is what the index said."""
    with open_store(path) as store:
        before = set(stored_blocks(store.place))
    for index in path.glob("index.sqlite3*"):
        index.unlink()
    with open_store(path) as store:
        assert {name for (name,) in store.index.query("SELECT name FROM blocks")} == before
        assert_counts(store)


@pytest.fixture
def stopped(server: Server) -> Callable[[int], Stopped]:
    """A save that stopped before it renamed its file of this number."""

    def stop(number: int) -> Stopped:
        server.begin("stop", number)
        assert "pid" in server.line()
        path = Path(server.line()["stopping"])
        while Path(f"/proc/{server.running}/stat").read_text().split()[2] != "T":
            time.sleep(0.001)
        return Stopped(server.running, path)

    return stop


@dataclass
class Stopped:
    pid: int
    path: Path
    """The file that it has written."""

    def grow_old(self) -> None:
        for path in self.path.parent.iterdir():
            os.utime(path, (1, 1))


@pytest.mark.parametrize("number", [1, 4, 7])  # of six blocks and the session's own file
def test_a_writer_that_was_stopped_longer_than_the_grace_time_still_finishes(
    server: Server, stopped: Callable[[int], Stopped], store_path: Path, number: int
) -> None:
    # A49: age alone does not prove that a writer is dead.
    writer = stopped(number)
    writer.grow_old()
    with open_store(store_path) as store:
        assert gc(store).unfinished == 0
        assert_counts(store)
        assert writer.path.exists()
        os.kill(writer.pid, signal.SIGCONT)
        assert server.line() == {"saved": True}
        _assert_whole(store)


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_writer_whose_file_was_cleaned_away_while_it_was_stopped_writes_it_again(
    server: Server, stopped: Callable[[int], Stopped], store_path: Path, number: int
) -> None:
    writer = stopped(number)
    shutil.rmtree(store_path / "tmp")
    os.kill(writer.pid, signal.SIGCONT)
    assert server.line() == {"saved": True}
    with open_store(store_path) as store:
        _assert_whole(store)


@pytest.mark.parametrize("number", [1, 4, 7])
def test_the_file_of_a_killed_writer_counts_until_the_grace_time_is_over(
    server: Server, stopped: Callable[[int], Stopped], store_path: Path, number: int
) -> None:
    # A49
    writer = stopped(number)
    os.kill(writer.pid, signal.SIGKILL)
    assert server.line() == {"ended": -signal.SIGKILL}
    with open_store(store_path) as store:
        assert gc(store).unfinished == 0
        assert writer.path.exists()
        assert_counts(store)
        taken = store.space.used()
        writer.grow_old()
        assert gc(store, dry_run=True).unfinished > 0
        size = sum(path.stat().st_size for path in writer.path.parent.glob("*.part"))
        assert gc(store).freed_bytes == size
        assert not writer.path.exists()
        assert store.space.used() == taken - size
        assert_counts(store)
        assert verify_store(store).bad == []


def _assert_whole(store: Store) -> None:
    engine = StampedEngine(capacity=300)
    session = Session(store, engine, "chat")
    report = session.resume(session.stored_token_ids(), leave=0)
    assert (report.reused_tokens, report.damage) == (100, ())
    engine.check_rows()
    assert verify_store(store).bad == []
    assert_counts(store)
