"""What tests run in a process of its own: `child.py ACTION STORE ...`, one JSON line a result."""

from __future__ import annotations

import json
import os
import sys

from kvsnap.formats.codecs import CODECS, get_codec
from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn


def say(**result: object) -> None:
    print(json.dumps(result), flush=True)


def take_turn(
    path: str, count: str, seed: str, name: str, save: str = "save", check: str = "check"
) -> None:
    """Resume `count` tokens, compute the rest, save; tell what was really computed."""
    engine = StampedEngine()
    with Store(path) as store:
        error, written = "", 0
        try:
            done = turn(store, engine, some_ids(int(count), int(seed)), name or None, save=False)
            if save == "save":
                written = done.session.save().blocks_written
        except KvsnapError as problem:
            error = f"{type(problem).__name__}: {problem.what}"
        if check == "check":
            engine.check_rows()
        say(
            computed=engine.evaluated,
            positions=engine.positions,
            written=written,
            error=error,
            reused=done.resumed.reused_tokens,
            stopped_by=done.resumed.stopped_by,
            fidelity=done.resumed.fidelity,
        )


def put(path: str, rounds: str) -> None:
    """Store the same 4 blocks in every round, as a process that knows of none."""
    ids = some_ids(64)
    for _ in range(int(rounds)):
        with Store(path) as store:
            store.blocks.has = lambda name: False  # type: ignore[method-assign]
            engine = StampedEngine()
            turn(store, engine, ids)
            engine.check_rows()
    say(done=rounds)


def put_and_remove(path: str, rounds: str) -> None:
    """Store the same 4 blocks in every round, and remove one now and then."""
    ids = some_ids(64)
    with Store(path) as store:
        for number in range(int(rounds)):
            engine = StampedEngine()
            done = turn(store, engine, ids)
            engine.check_rows()
            assert done.saved is not None
            if number % 3 == 0:
                folder = store.place.blocks
                victim = sorted(folder.glob("*/*"))[number % 4 :][:1]
                for file in victim:
                    file.unlink(missing_ok=True)
        say(done=rounds)


def save_until_killed(path: str, seed: str) -> None:
    """Save ever longer sessions; a line tells of a save only after it returned."""
    with Store(path) as store:
        engine = StampedEngine()
        number = 0
        while True:
            for count in range(5, 120, 23):
                name = f"chat {number}"
                turn(store, engine, some_ids(count, int(seed) + number), name)
                say(name=name, count=count, seed=int(seed) + number)
            number += 1


def verify(path: str) -> None:
    with Store(path) as store:
        report = verify_store(store, progress=lambda done, total: None)
        say(checked=report.checked, bad=[b.reason for b in report.bad], unreachable=[])


ACTIONS = {
    "turn": take_turn,
    "put": put,
    "put-and-remove": put_and_remove,
    "save-until-killed": save_until_killed,
    "verify": verify,
}


def become(user: int) -> None:
    """Another user; what is imported on first use comes in before, from folders closed to them."""
    for codec in CODECS:
        get_codec(codec)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


if __name__ == "__main__":
    if "CHILD_USER" in os.environ:
        become(int(os.environ["CHILD_USER"]))
    ACTIONS[sys.argv[1]](*sys.argv[2:])
