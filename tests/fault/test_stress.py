"""Many processes on one store that has room for a third of what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

CHILD = Path(__file__).parents[1] / "stress_child.py"
CAPACITY = 100_000
"""Of 300,000: four shared blocks, eleven more in each of six sessions, and the session files."""
SECONDS = 15
BLOCK = 4_000


def start(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(CHILD), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not err
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_nine_processes_keep_the_budget_and_never_see_a_wrong_row(store_path: Path) -> None:
    workers = [start("work", store_path, CAPACITY, SECONDS, seed) for seed in range(6)]
    others = [start("gc", store_path, CAPACITY, SECONDS) for _ in range(2)]
    checker = start("verify", store_path, CAPACITY, SECONDS)
    most = 0
    with Store(store_path, capacity=CAPACITY, min_free="0") as store:
        while any(process.poll() is None for process in workers):
            most = max(most, disk_bytes(store.place))
            time.sleep(0.01)
        done = [line for process in workers for line in finish(process)]
        collected = [line for process in others for line in finish(process)]
        (checked,) = finish(checker)
        # A listing takes so long that a block that went and one that came are both in it.
        assert CAPACITY / 2 < most <= CAPACITY + 8 * BLOCK
        assert {finding.split(": ", 1)[1] for finding in checked["bad"]} == set()
        assert checked["rounds"] > 5
        total = {
            key: sum(line.get(key, 0) for line in done) for key in ("turns", "saved", "reused")
        }
        assert min(line["turns"] for line in done) > 5
        assert total["saved"] > 50
        assert total["reused"] > 16 * total["turns"]
        assert sum(line["evicted"] for line in collected) > 20
        assert sum(line["vanished"] for line in collected) == 0
        report = verify_store(store)
        assert (report.bad, report.unreachable) == ([], [])
        assert_closed(store)
        assert_counts(store)
        assert disk_bytes(store.place) <= CAPACITY
        assert store.index.query("SELECT * FROM unfinished") == []
        assert store.index.query("SELECT * FROM holds") == []
        assert not [path for path in store.place.temporary.iterdir() if path.suffix == ".part"]


def test_two_processes_that_save_one_session_at_once_keep_both_turns(store_path: Path) -> None:
    processes = [start("save-together", store_path, seed, 20) for seed in (1, 2)]
    saved = [line for process in processes for line in finish(process)]
    assert len({line["name"] for line in saved}) == len(saved) == 40
    assert sum(line["name"].endswith("@2") for line in saved) == 20
    with Store(store_path) as store:
        for line in saved:
            stored = Session(store, StampedEngine(), line["name"]).stored_token_ids()
            assert stored.tolist() == some_ids(40, line["seed"]).tolist()
        assert len(list(store.listing)) == 40
