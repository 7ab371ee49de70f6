"""The index is a hint: damaged, old, missing or of another program, nothing comes out wrong."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import StoreError
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

PROMPTS = [[*some_ids(32).tolist(), *some_ids(20 + seed, seed).tolist()] for seed in range(1, 6)]


def filled(path: Path) -> None:
    with Store(path) as store:
        for number, ids in enumerate(PROMPTS[:4]):
            turn(store, StampedEngine(), ids, f"chat/{number}")


def drop_logs(path: Path) -> bytes:
    """Bring the log into the database; returns the database's bytes."""
    with sqlite3.connect(path / "index.sqlite3") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    for name in ("index.sqlite3-wal", "index.sqlite3-shm"):
        (path / name).unlink(missing_ok=True)
    return (path / "index.sqlite3").read_bytes()


def use(path: Path, *, exact: bool = True) -> None:
    """Resume and save every prompt, each with an engine of its own."""
    for number, ids in enumerate(PROMPTS):
        engine = StampedEngine()
        with Store(path) as store:
            turn(store, engine, ids, f"chat/{number}")
        assert engine.token_ids().tolist() == ids
        engine.check_rows()
        if exact:
            assert engine.evaluated == (1 if number < 4 else len(ids) - 32)


def assert_right(path: Path) -> None:
    """All is there, nothing is wrong, and one token is computed: as after an undamaged run."""
    for number, ids in enumerate(PROMPTS):
        engine = StampedEngine()
        with Store(path) as store:
            turn(store, engine, ids, f"chat/{number}", save=False)
        assert engine.positions == [len(ids) - 1]
        engine.check_rows()


REPLACEMENTS: dict[str, Callable[[Path], object]] = {
    "gone": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "text": lambda p: p.write_text("this is no database, and longer than a header is " * 9),
    "zeros": lambda p: p.write_bytes(bytes(8192)),
    "cut to a page": lambda p: os.truncate(p, 4096),
    "cut to half": lambda p: os.truncate(p, p.stat().st_size // 2),
    "cut inside the header": lambda p: os.truncate(p, 50),
    "another program's": lambda p: _other_database(p, 0),
    "a newer kvsnap's": lambda p: _other_database(p, 99),
    "our version, other tables": lambda p: _other_database(p, 1),
    "our version, no tables": lambda p: _tables_dropped(p, "blocks"),
    "no counters": lambda p: _tables_dropped(p, "counters"),
}


def _other_database(path: Path, version: int) -> None:
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE blocks(x)")
        db.execute(f"PRAGMA user_version = {version}")
    db.close()


def _tables_dropped(path: Path, table: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"DROP TABLE {table}")
    db.close()


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_an_index_that_is_none_is_built_anew(store_path: Path, kind: str) -> None:
    filled(store_path)
    drop_logs(store_path)
    REPLACEMENTS[kind](store_path / "index.sqlite3")
    use(store_path)
    assert_right(store_path)
    with Store(store_path) as store:
        report = verify_store(store, progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])


def test_an_index_that_is_a_folder_is_an_error_of_one_line(store_path: Path) -> None:
    filled(store_path)
    drop_logs(store_path)
    (store_path / "index.sqlite3").unlink()
    (store_path / "index.sqlite3").mkdir()
    with pytest.raises(StoreError):
        use(store_path)


def test_an_older_index_finds_what_it_knows_and_learns_the_rest(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), PROMPTS[0], "chat/0")
    old = drop_logs(store_path)
    filled(store_path)
    drop_logs(store_path)
    (store_path / "index.sqlite3").write_bytes(old)
    use(store_path, exact=False)
    assert_right(store_path)


def test_an_index_of_blocks_that_are_gone_serves_none_of_them(store_path: Path) -> None:
    filled(store_path)
    shutil.rmtree(store_path / "blocks")
    for ids in PROMPTS:
        engine = StampedEngine()
        with Store(store_path) as store:
            turn(store, engine, ids)
        engine.check_rows()
    with Store(store_path) as store:
        report = verify_store(store, progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])


@pytest.mark.parametrize("seed", range(12))
def test_flips_anywhere_in_the_index_never_give_a_wrong_row_or_an_error(
    store_path: Path, seed: int
) -> None:
    filled(store_path)
    good, index = drop_logs(store_path), store_path / "index.sqlite3"
    chosen = random.Random(seed)
    for _ in range(6):
        data = bytearray(good)
        for _ in range(chosen.choice((1, 1, 3, 40))):
            data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        index.write_bytes(data)
        use(store_path, exact=False)
        drop = chosen.random() < 0.5
        for log in store_path.glob("index.sqlite3-*" if drop else "index.sqlite3*"):
            log.unlink()
    index.unlink(missing_ok=True)
    assert_right(store_path)


@pytest.mark.parametrize("page", range(14))
def test_a_page_of_rubbish_in_the_index_never_gives_a_wrong_row_or_an_error(
    store_path: Path, page: int
) -> None:
    filled(store_path)
    good, index = drop_logs(store_path), store_path / "index.sqlite3"
    chosen = random.Random(page)
    start = page * 4096 % len(good)
    for size in (4096, 700, 60):
        data = bytearray(good)
        at = start + chosen.randrange(4096 - size + 1)
        data[at : at + size] = chosen.randbytes(size)
        index.write_bytes(data[: len(good)])
        use(store_path, exact=False)
        for log in store_path.glob("index.sqlite3-*"):
            log.unlink()
    for log in store_path.glob("index.sqlite3*"):
        log.unlink()
    assert_right(store_path)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE blocks SET bytes = bytes + 1",
        "UPDATE blocks SET bytes = 'many'",
        "UPDATE blocks SET bytes = NULL WHERE 0",
        "UPDATE blocks SET start = start + 16",
        "UPDATE blocks SET tokens = x'000102'",
        "UPDATE blocks SET tokens = 'text'",
        "UPDATE blocks SET tokens = (SELECT tokens FROM blocks WHERE start = 0)",
        "UPDATE blocks SET parent = NULL",
        "UPDATE blocks SET parent = 1 WHERE id > 1",
        "UPDATE blocks SET parent = id",
        "UPDATE blocks SET reachable = 0",
        "UPDATE blocks SET lost = 'never was'",
        "UPDATE blocks SET lost = CAST(x'ff' AS TEXT)",
        "UPDATE blocks SET codec = CAST(x'ff' AS TEXT), used = 'x', synced = 'x'",
        "UPDATE roots SET identity = CAST(x'ff' AS TEXT)",
        "UPDATE roots SET root_id = 'other'",
        "DELETE FROM counters",
        "UPDATE counters SET value = 'x'",
        "DELETE FROM blocks WHERE start = 16",
        "UPDATE blocks SET name = 'text' || id",
        "UPDATE blocks SET name = x'00' WHERE start = 16",
    ],
)
def test_rows_that_lie_never_give_a_wrong_row_or_an_error(store_path: Path, change: str) -> None:
    filled(store_path)
    drop_logs(store_path)
    db = sqlite3.connect(store_path / "index.sqlite3", isolation_level=None)
    db.execute(change)
    db.close()
    use(store_path, exact=False)
    use(store_path, exact=False)
    with Store(store_path) as store:
        engine = StampedEngine(weights="others")
        turn(store, engine, PROMPTS[0], save=False)
        assert engine.evaluated == len(PROMPTS[0])
