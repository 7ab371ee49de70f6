"""SIGKILL at any moment of a save within a budget, of gc, of a pin and of a replaced session."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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

    def lines_until_killed(self, loop: str, seed: int, seconds: float) -> list[dict[str, Any]]:
        """What a process said before it was killed, `seconds` after its first line."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{loop} {seed}\n")
        self.process.stdin.flush()
        pid = self._line()["pid"]
        lines = [self._line()]
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        while "ended" not in lines[-1]:
            lines.append(self._line())
        assert lines.pop() == {"ended": -signal.SIGKILL}, "it failed by itself"
        return lines

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
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
            evicted += gc(store).evicted
            assert_closed(store)
            assert_counts(store)
            report = verify_store(store)
            assert (report.bad, report.unreachable) == ([], [])
        if number % 7 == 6:
            _with_a_new_index(store_path)
    with open_store(store_path) as store:
        counted = store.index.query("SELECT value FROM counters WHERE name = 'evicted_blocks'")
        assert evicted + counted[0][0] > 0 or loop == "replace", "nothing was ever evicted"


def _assert_pinned(store: Store, lines: list[dict[str, Any]]) -> None:
    """The session that was pinned at the kill has all its blocks; it is unpinned for the next."""
    last = next((line for line in lines[::-1] if "ids" not in line), {})
    listed = {entry.facts.name: entry for entry in store.listing}
    if "pinned" in last and lines[-1] is last:
        entry = listed[last["pinned"]]
        assert entry.pinned_until is not None
        assert entry.stored_blocks == entry.facts.blocks
    for entry in listed.values():
        if entry.pinned_until is not None:
            assert entry.stored_blocks == entry.facts.blocks
            store.pins.unpin_session(entry.path.parent.name, str(entry.facts.name))


def _with_a_new_index(path: Path) -> None:
    """What the files say is what the index said."""
    with open_store(path) as store:
        before = set(stored_blocks(store.place))
    for index in path.glob("index.sqlite3*"):
        index.unlink()
    with open_store(path) as store:
        assert {name for (name,) in store.index.query("SELECT name FROM blocks")} == before
        assert_counts(store)


def test_a_writer_that_was_stopped_longer_than_the_grace_time_still_finishes(
    server: Server, store_path: Path
) -> None:
    # A49: age alone does not prove that a writer is dead.
    assert server.process.stdin is not None
    server.process.stdin.write("save 1\n")
    server.process.stdin.flush()
    pid = server._line()["pid"]
    server._line()
    stopped = 0
    try:
        with open_store(store_path) as store:
            for _ in range(60):
                os.kill(pid, signal.SIGSTOP)
                parts = list(store.place.temporary.glob("*.part"))
                for path in parts:
                    os.utime(path, (1, 1))
                gc(store)
                assert [path for path in parts if path.exists()] == parts
                stopped += bool(parts)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.003)
                if stopped > 3:
                    break
        said = [server._line() for _ in range(3)]  # it goes on
    finally:
        os.kill(pid, signal.SIGKILL)
    assert stopped
    with open_store(store_path) as store:
        assert_sessions(store, {said[-1]["name"]: said[-1]["ids"]})
        assert verify_store(store).bad == []
