"""SIGKILL at any moment of a save: what was reported saved is there, and nothing is wrong."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

CHILD = Path(__file__).parents[1] / "child.py"
ROUNDS = 30


def killed_while_saving(path: Path, seed: int, seconds: float) -> list[dict]:
    """What the child reported saved before it was killed, `seconds` after its first save."""
    command = [sys.executable, str(CHILD), "save-until-killed", str(path), str(seed)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline()]
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or []))
    reader.start()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reader.join()
    process.stdout.close()
    complete = [line for line in lines if line.endswith("\n")]
    with contextlib.suppress(IndexError):
        assert json.loads(complete[0])["name"]
    return [json.loads(line) for line in complete]


def test_a_killed_save_loses_nothing_that_was_reported(store_path: Path) -> None:
    # A17, A49: one store lives through all the rounds; each has names and ids of its own.
    chosen, saves = random.Random(1), 0
    for number in range(ROUNDS):
        seed = 1000 * number
        lines = killed_while_saving(store_path, seed, chosen.uniform(0, 0.06))
        assert lines
        saves += len(lines)
        newest = {line["name"]: line for line in lines}
        with Store(store_path) as store:
            for line in newest.values():
                engine = StampedEngine()
                session = Session(store, engine, line["name"])
                stored = session.stored_token_ids()
                # The save that was under way may have got through unreported.
                assert len(stored) >= line["count"]
                ids = some_ids(len(stored), line["seed"])
                assert stored.tolist() == ids.tolist()
                session.resume(ids, leave=0)
                assert engine.held == len(ids)
                engine.check_rows()
            report = verify_store(store, progress=lambda done, total: None)
        assert (report.bad, report.unreachable) == ([], [])
        for file in store_path.glob("sessions/*/*"):
            file.unlink()  # the names start again in the next round
        if number % 5 == 4:
            for index in store_path.glob("index.sqlite3*"):
                index.unlink()
    assert saves > ROUNDS
    assert len(list((store_path / "tmp").glob("*.part"))) <= ROUNDS
