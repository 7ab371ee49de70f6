"""Processes for tests of many at once and of kills: `stress_child.py ACTION STORE ...`.

One JSON line a result. `serve` imports once and forks a process for each line of its input, so that
a hundred of them can be killed within seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kvsnap.formats.container import Packed
from kvsnap.formats.errors import NotAllStored, SessionMoved, StoreFull
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore import files
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

SESSIONS = 6
SHARED, LONGEST = 64, 240


def say(**result: object) -> None:
    os.write(1, (json.dumps(result) + "\n").encode())  # whole lines, from many processes


def ids_of(number: int, count: int = LONGEST) -> TokenIds:
    """What session `number` says; all begin with the same four blocks."""
    ids = some_ids(LONGEST, seed=number + 1)
    ids[:SHARED] = some_ids(SHARED)
    return ids[:count]


def opened(path: str, capacity: str) -> Store:
    return Store(path, capacity=int(capacity), min_free="0")


def work(path: str, capacity: str, seconds: str, seed: str) -> None:
    """Resume, compute and save sessions at random; every row is checked."""
    chosen, counts = random.Random(int(seed)), Counter[str]()
    until = time.monotonic() + float(seconds)
    with opened(path, capacity) as store:
        while time.monotonic() < until:
            number = chosen.randrange(SESSIONS)
            engine = StampedEngine(capacity=LONGEST)
            session = Session(store, engine, f"s{number}", codec=chosen.choice(["raw", "zstd"]))
            ids = ids_of(number, chosen.randrange(SHARED // 2, LONGEST))
            report = session.resume(ids)
            engine.evaluate(ids[report.reused_tokens :])
            engine.check_rows()
            assert engine.token_ids().tolist() == ids.tolist()
            counts["turns"] += 1
            counts["reused"] += report.reused_tokens
            if chosen.random() < 0.6:
                counts[_saved(store, session)] += 1
    say(**counts)


def _saved(store: Store, session: Session) -> str:
    try:
        session.save()
    except SessionMoved as moved:
        store.sessions.remove(session.tenant_id, moved.stored_as)
        return "moved"
    except NotAllStored:
        return "in part"
    except StoreFull:
        return "full"
    return "saved"


def collect(path: str, capacity: str, seconds: str) -> None:
    """gc, sometimes down to half of what the others may fill, sometimes a dry run."""
    until, counts = time.monotonic() + float(seconds), Counter[str]()
    for number in itertools.count():
        if time.monotonic() > until:
            break
        with opened(path, str(int(capacity) // (1 + number % 2))) as store:
            report = gc(store, dry_run=number % 3 == 0)
            counts["evicted"] += 0 if report.dry_run else report.evicted
            counts["rounds"] += 1
            counts["vanished"] += report.vanished
        time.sleep(0.02)
    say(**counts)


def check(path: str, capacity: str, seconds: str) -> None:
    """verify and stats, which must not take for damage what the others do."""
    until, bad, rounds = time.monotonic() + float(seconds), list[str](), 0
    with opened(path, capacity) as store:
        while time.monotonic() < until:
            report = verify_store(store)
            bad += [f"{finding.name}: {finding.reason}" for finding in report.bad]
            bad += [f"{name}: unreachable" for name in report.unreachable]
            assert stats(store).blocks >= 0
            rounds += 1
            time.sleep(0.02)
    say(bad=bad, rounds=rounds)


def save_together(path: str, seed: str, rounds: str) -> None:
    """Save one session at the same moment as another process, with other tokens."""
    with Store(path, min_free="0") as store:
        for number in range(int(rounds)):
            name, own = f"both{number}", 1000 * int(seed) + number
            engine = StampedEngine()
            engine.evaluate(some_ids(40, own))
            session = Session(store, engine, name)
            Path(f"{path}.{number}.{seed}").touch()
            while not all(Path(f"{path}.{number}.{one}").exists() for one in (1, 2)):
                time.sleep(0)  # until both have opened it
            try:
                session.save()
            except SessionMoved as moved:
                name = moved.stored_as
            say(name=name, seed=own)


def save_on(store: Store, seed: int) -> None:
    """Ever longer sessions that share a front; a line tells of a save only after it returned."""
    for number in itertools.count():
        name, engine = f"s{(seed + number) % SESSIONS}", StampedEngine(capacity=LONGEST)
        for count in range(30, 150, 37):
            ids = ids_of((seed + number) % SESSIONS, count)
            _turn(store, engine, ids, name)
            say(name=name, ids=ids.tolist())


def gc_on(store: Store, seed: int) -> None:
    """Fill the store and empty it again."""
    chosen = random.Random(seed)
    for number in itertools.count(seed):
        ids = ids_of(number % SESSIONS, 200)
        _turn(store, StampedEngine(capacity=LONGEST), ids, None)
        with Store(store.path, capacity=chosen.randrange(1, 60_000), min_free="0") as small:
            gc(small)
        say(round=number)


def pin_on(store: Store, seed: int) -> None:
    """Save, pin, and unpin, while the store is full; a pinned session is whole."""
    for number in itertools.count(seed):
        name = f"s{number % SESSIONS}"
        ids = ids_of(number % SESSIONS, 100)
        _turn(store, StampedEngine(capacity=LONGEST), ids, name)
        say(name=name, ids=ids.tolist())
        tenant = Session(store, StampedEngine()).tenant_id
        store.pins.pin_session(tenant, name, 500 if number % 2 else None)
        say(pinned=name)
        _turn(store, StampedEngine(capacity=LONGEST), ids_of(7 + number % 5, 200), None)
        say(unpinning=name)
        store.pins.unpin_session(tenant, name)


def replace_on(store: Store, seed: int) -> None:
    """One session, replaced by longer and by quite other tokens."""
    for number in itertools.count(seed):
        ids = ids_of(number % SESSIONS, 35 + number * 13 % 100)
        _turn(store, StampedEngine(capacity=LONGEST), ids, "one")
        say(name="one", ids=ids.tolist())


def stop_on(store: Store, seed: int) -> None:
    """Stop between the write and the rename of the `seed`-th file of a save."""
    write, number = files.write_file, itertools.count(1)

    def write_and_stop(path: Path, packed: Packed) -> None:
        write(path, packed)
        if path.suffix == ".part" and next(number) == seed:
            say(stopping=str(path))
            os.kill(os.getpid(), signal.SIGSTOP)

    files.write_file = write_and_stop
    _turn(store, StampedEngine(capacity=LONGEST), ids_of(1, 100), "chat")
    say(saved=True)
    signal.pause()


def _turn(store: Store, engine: StampedEngine, ids: TokenIds, name: str | None) -> None:
    turn(store, engine, ids, name, codec="raw")
    engine.check_rows()


LOOPS: dict[str, Callable[[Store, int], None]] = {
    "save": save_on,
    "gc": gc_on,
    "pin": pin_on,
    "replace": replace_on,
    "stop": stop_on,
}


def serve(path: str, capacity: str) -> None:
    """A line "LOOP SEED" begins a process, which says its id; the end of each is told."""
    for line in sys.stdin:
        loop, seed = line.split()
        child = os.fork()
        if child == 0:
            say(pid=os.getpid())
            with opened(path, capacity) as store:
                LOOPS[loop](store, int(seed))
        _, status = os.waitpid(child, 0)
        say(ended=os.waitstatus_to_exitcode(status))


ACTIONS: dict[str, Callable[..., None]] = {
    "work": work,
    "gc": collect,
    "verify": check,
    "save-together": save_together,
    "serve": serve,
}

if __name__ == "__main__":
    ACTIONS[sys.argv[1]](*sys.argv[2:])
