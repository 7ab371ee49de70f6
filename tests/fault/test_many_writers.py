"""Many processes and threads on one store: one valid file a name, no leftovers, no wrong row."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

CHILD = Path(__file__).parents[1] / "child.py"
Opener = Callable[[], Store]


def start(*args: object) -> subprocess.Popen:
    command = [sys.executable, "-W", "error", str(CHILD), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> list[dict]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def assert_whole(open_store: Opener, blocks: int) -> None:
    store = open_store()
    report = verify_store(store, progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])
    assert len(list(store.place.blocks.glob("*/*"))) == blocks
    assert not list(store.place.temporary.glob("*.part"))
    assert not list(store.place.quarantine.glob("*"))


@pytest.mark.parametrize("action", ["put", "put-and-remove"])
def test_eight_processes_put_the_same_blocks(
    open_store: Opener, store_path: Path, action: str
) -> None:
    # A38; in the harder variant files are removed meanwhile as well, as by hand.
    for process in [start(action, store_path, 40) for _ in range(8)]:
        finish(process)
    turn(open_store(), StampedEngine(), some_ids(64))
    assert_whole(open_store, 4)


def test_processes_that_create_the_store_together_agree(tmp_path: Path) -> None:
    path = tmp_path / "new"
    for process in [start("turn", path, 130 + number, 0, f"s{number}") for number in range(6)]:
        (found,) = finish(process)
        assert found["error"] == ""
    engine = StampedEngine()
    with Store(path) as store:
        turn(store, engine, some_ids(135), "s5")
        assert verify_store(store, progress=lambda done, total: None).bad == []
    assert engine.positions == [134]


def test_a_reader_sees_a_block_whole_or_not_at_all(open_store: Opener, store_path: Path) -> None:
    # A37: look up and load while another process writes the very blocks.
    writer = start("put-and-remove", store_path, 60)
    seen = set()
    store = open_store()
    while writer.poll() is None:
        engine = StampedEngine()
        seen.add(Session(store, engine).resume(some_ids(65)).reused_tokens)
        engine.check_rows()
    finish(writer)
    assert seen <= {0, 16, 32, 48, 64}
    turn(open_store(), StampedEngine(), some_ids(64))
    assert_whole(open_store, 4)


def test_threads_that_save_and_load_at_random_get_their_own_rows(open_store: Opener) -> None:
    # A40: 6 sessions that share 2 blocks; 4 threads; every loaded stamp belongs to the asker.
    store, errors = open_store(), list[BaseException]()
    locks = [threading.Lock() for _ in range(6)]
    lengths = [0] * 6

    def work(seed: int) -> None:
        chosen = random.Random(seed)
        try:
            for _ in range(60):
                number = chosen.randrange(6)
                with locks[number]:
                    step(number, chosen)
        except BaseException as error:
            errors.append(error)
            raise

    def step(number: int, chosen: random.Random) -> None:
        ids = [*some_ids(32), *some_ids(300, seed=number + 1)]
        engine = StampedEngine(capacity=400)
        if chosen.random() < 0.3:
            engine.evaluate(some_ids(20, seed=50 + number))
        before = engine.evaluated
        count = min(len(ids), lengths[number] + chosen.randrange(1, 12))
        done = turn(store, engine, ids[:count], f"chat/{number}", save=False)
        engine.check_rows()
        assert done.resumed.reused_tokens == min(lengths[number], count - 1) or (
            done.resumed.reused_tokens >= lengths[number]
        )
        assert engine.evaluated - before == count - done.resumed.reused_tokens
        if chosen.random() < 0.7:
            done.session.save()
            lengths[number] = count

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])
