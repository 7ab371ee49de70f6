"""Leases: what a call needs stays while it runs, and no longer, however the call ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from kvsnap.formats.errors import StoreFull
from kvsnap.kvstore import blocks, chain_reader, holds, sessions
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import assert_counts, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SIZE = 16
IDS = some_ids(4 * SIZE + 5)
HOLDER = """
import sys, time
from kvsnap.kvstore.store import Store
store = Store(sys.argv[1])
((name,),) = store.index.query("SELECT name FROM blocks ORDER BY start DESC LIMIT 1")
with store.holds.lease() as lease:
    assert lease.keep(name)
    print("holding", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def four_blocks(store: Store) -> Store:
    turn(store, StampedEngine(), IDS)
    assert count(store) == 4
    return store


def count(store: Store) -> int:
    return len(stored_blocks(store.place))


def empty(store: Store) -> int:
    """Evict, as another process, all that may go; how many blocks are left."""
    with Store(store.path, capacity=1, min_free="0") as other:
        gc(other)
    return count(store)


def deepest(store: Store) -> bytes:
    return bytes(store.index.query("SELECT name FROM blocks ORDER BY start DESC LIMIT 1")[0][0])


def test_a_chain_that_is_being_loaded_is_not_evicted(
    four_blocks: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A39: another process runs gc between look-up and load.
    left, read = list[int](), chain_reader.read_blocks

    def read_after_gc(*args: object) -> object:
        left.append(empty(four_blocks))
        return read(*args)

    monkeypatch.setattr(chain_reader, "read_blocks", read_after_gc)
    engine = StampedEngine()
    report = Session(four_blocks, engine).resume(IDS)
    assert left == [4]
    assert (report.reused_tokens, report.damage) == (64, ())
    engine.check_rows()
    assert empty(four_blocks) == 0


def test_a_chain_that_is_being_saved_is_not_evicted_before_its_session_is_there(
    four_blocks: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, publish = list[int](), sessions.Sessions.publish

    def publish_after_gc(*args: object, **options: object) -> object:
        left.append(empty(four_blocks))
        return publish(*args, **options)

    monkeypatch.setattr(sessions.Sessions, "publish", publish_after_gc)
    turn(four_blocks, StampedEngine(), [*IDS, *some_ids(30, 7)], "chat")
    assert left == [6]
    assert empty(four_blocks) == 0


@pytest.mark.parametrize("numbers", [(0,), (2,), (3,), (0, 1), (1, 3), (0, 1, 2, 3)])
def test_a_save_that_mends_blocks_in_the_middle_holds_the_end_all_the_while(
    four_blocks: Store, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, ...]
) -> None:
    names = [n for (n,) in four_blocks.index.query("SELECT name FROM blocks ORDER BY start")]
    engine = StampedEngine()
    session = Session(four_blocks, engine, "chat")
    session.resume(IDS)
    engine.evaluate(IDS[64:])
    for number in numbers:
        four_blocks.place.block(names[number]).unlink()
    counts, put = list[tuple[int, int]](), blocks.Blocks.put

    def put_before_gc(*args: object, **options: object) -> object:
        done = put(*args, **options)
        counts.append((count(four_blocks), empty(four_blocks)))
        return done

    monkeypatch.setattr(blocks.Blocks, "put", put_before_gc)
    session.save()
    assert counts[-1] == (4, 4)
    assert [before for before, _ in counts] == [after for _, after in counts]


def test_a_resume_that_never_loads_keeps_nothing_afterwards(four_blocks: Store) -> None:
    # A48a
    Session(four_blocks, StampedEngine()).resume(IDS[:3])
    Session(four_blocks, StampedEngine()).resume(IDS)
    assert empty(four_blocks) == 0


def test_a_load_that_fails_keeps_nothing_afterwards(four_blocks: Store) -> None:
    # A48b
    engine = StampedEngine()
    with (
        mock.patch.object(engine, "load", side_effect=RuntimeError("no")),
        pytest.raises(RuntimeError),
    ):
        Session(four_blocks, engine).resume(IDS)
    assert four_blocks.index.query("SELECT * FROM holds") == []
    assert empty(four_blocks) == 0


def test_what_a_killed_process_held_is_free_with_its_death(four_blocks: Store) -> None:
    # A48c
    command = [sys.executable, "-c", HOLDER, str(four_blocks.path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    assert empty(four_blocks) == 4
    holder.send_signal(signal.SIGSTOP)
    assert empty(four_blocks) == 4, "a stopped process is alive"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    assert empty(four_blocks) == 0
    assert_counts(four_blocks)


def test_a_save_that_runs_out_of_room_keeps_nothing_afterwards(four_blocks: Store) -> None:
    # A48d: the third block of four finds no room.
    lease = four_blocks.holds.lease()
    lease.__enter__().keep(deepest(four_blocks))
    size = sum(size for _, size in stored_blocks(four_blocks.place).values())
    with Store(four_blocks.path, capacity=size + 8000, min_free="0") as store:
        with pytest.raises(StoreFull):
            turn(store, StampedEngine(), some_ids(64, 9), codec="raw")
        assert 4 < count(store) < 8
    lease.__exit__(None, None, None)
    assert empty(four_blocks) == 0


def test_a_lease_of_a_living_process_ends_an_hour_after_its_last_use(
    four_blocks: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = mock.Mock()
    clock.time.side_effect = lambda: time.time() + clock.passed
    clock.passed = 0
    monkeypatch.setattr(holds, "time", clock)
    with four_blocks.holds.lease() as lease:
        lease.keep(deepest(four_blocks))
        clock.passed = 3000
        lease.keep(deepest(four_blocks))
        clock.passed = 6000
        assert empty(four_blocks) == 4
        clock.passed = 6700
        assert empty(four_blocks) == 0
        assert not lease.keep(bytes(32))


def test_a_lease_follows_its_call_into_a_new_index(four_blocks: Store) -> None:
    with four_blocks.holds.lease() as lease:
        lease.keep(deepest(four_blocks))
        for file in four_blocks.path.glob("index.sqlite3*"):
            file.unlink()
        assert lease.keep(deepest(four_blocks))
        assert empty(four_blocks) == 4
    assert empty(four_blocks) == 0


def test_a_lease_moves_and_holds_only_where_it_stands(four_blocks: Store) -> None:
    names = [n for (n,) in four_blocks.index.query("SELECT name FROM blocks ORDER BY start")]
    with four_blocks.holds.lease() as lease:
        for name in [names[3], names[1]]:
            assert lease.keep(name)
        assert four_blocks.index.query("SELECT COUNT(*) FROM holds") == [(1,)]
        assert empty(four_blocks) == 2
    assert_counts(four_blocks)


def test_a_forked_child_does_not_keep_its_parents_leases_alive(
    four_blocks: Store, open_store: Callable[[], Store], tmp_path: Path
) -> None:
    script = f"""
import os, sys, time
from kvsnap.kvstore.store import Store
store = Store({str(four_blocks.path)!r})
((name,),) = store.index.query("SELECT name FROM blocks ORDER BY start DESC LIMIT 1")
lease = store.holds.lease().__enter__()
assert lease.keep(name)
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os._exit(9)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert parent.wait() == 9
        assert empty(four_blocks) == 0
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
