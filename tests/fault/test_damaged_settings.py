"""kvsnap.json damaged or lost: blocks are found as before, and the next save writes it anew."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, StoreError, Unsupported
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": lambda p: p.unlink(),
    "empty": lambda p: p.write_bytes(b""),
    "half": lambda p: p.write_bytes(p.read_bytes()[:20]),
    "rubbish": lambda p: p.write_bytes(b"\xff\xfe\x00 not json"),
    "a list": lambda p: p.write_text("[1, 2]"),
    "text": lambda p: p.write_text('"16"'),
    "null": lambda p: p.write_text("null"),
    "deep": lambda p: p.write_text("[" * 100_000),
    "no block size": lambda p: p.write_text('{"format": "1", "created": 1}'),
    "block size 0": lambda p: p.write_text('{"format": "1", "created": 1, "block_size": 0}'),
    "block size true": lambda p: p.write_text('{"format": "1", "created": 1, "block_size": true}'),
    "block size huge": lambda p: p.write_text('{"format": "1", "created": 1, "block_size": 1e9}'),
    "a folder": lambda p: (p.unlink(), p.mkdir()),
    "a link": lambda p: (p.unlink(), p.symlink_to("/etc/passwd")),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_stored_is_found_and_the_next_save_mends_it(store_path: Path, kind: str) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(40), "chat")
    DAMAGE[kind](store_path / "kvsnap.json")
    engine = StampedEngine()
    with Store(store_path) as store:
        assert bool(store.problem) == (kind != "gone")
        bad = verify_store(store, progress=lambda done, total: None).bad
        assert len(bad) == (kind != "gone")
        turn(store, engine, some_ids(50), "chat")
    assert engine.positions == list(range(40, 50))
    engine.check_rows()
    settings = json.loads((store_path / "kvsnap.json").read_text())
    assert (settings["format"], settings["block_size"]) == ("1", 16)
    with Store(store_path) as store:
        assert store.problem == ""
        assert verify_store(store, progress=lambda done, total: None).bad == []


def test_a_store_of_a_newer_format_is_refused_by_name(store_path: Path) -> None:
    (store_path / "kvsnap.json").write_text('{"format": "9", "created": 1, "block_size": 16}')
    with pytest.raises(Unsupported, match="'9'"):
        Store(store_path)


@pytest.mark.parametrize("below", [False, True])
def test_a_file_where_the_store_should_be_is_an_error_of_one_line(
    tmp_path: Path, below: bool
) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(KvsnapError), Store(path / "store" if below else path) as store:
        turn(store, StampedEngine(), some_ids(20), "chat")
    assert path.read_text() == "mine"


def test_opening_and_looking_create_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "store") as store:
        engine = StampedEngine()
        turn(store, engine, some_ids(40), "chat", save=False)
        assert list(store.listing) == []
        assert verify_store(store, progress=lambda done, total: None).checked == 0
    assert not (tmp_path / "store").exists()
    assert engine.evaluated == 40


def test_foreign_files_in_the_store_are_left_alone(store_path: Path) -> None:
    # A61
    foreign = ["notes.txt", "blocks/README", "blocks/ab/note", "sessions/x", "tmp/y", "cache.db"]
    for name in foreign:
        (store_path / name).parent.mkdir(parents=True, exist_ok=True)
        (store_path / name).write_text(name)
    for _ in range(2):
        with Store(store_path) as store:
            turn(store, StampedEngine(), some_ids(40), "chat")
        for index in store_path.glob("index.sqlite3*"):
            index.unlink()
    assert all((store_path / name).read_text() == name for name in foreign)
    engine = StampedEngine()
    with Store(store_path) as store:
        turn(store, engine, some_ids(40), "chat")
        assert verify_store(store, progress=lambda done, total: None).bad == []
        found = [finding.what for finding in examine(store_path)]
        assert any("6 things are not kvsnap's" in what for what in found)
    assert engine.positions == [39]


def test_a_store_path_near_the_systems_limit_works_or_is_refused_by_name(tmp_path: Path) -> None:
    # A18: SQLite opens paths of up to 511 bytes, the system those of up to 4095.
    for length in (300, 460, 600, 3950, 4060, 4200):
        path = tmp_path
        while len(str(path).encode()) < length - 210:
            path = path / ("語" * 66)
        path = path / ("n" * max(1, length - len(str(path).encode()) - 1))
        engine = StampedEngine()
        fits = contextlib.nullcontext() if length < 500 else contextlib.suppress(StoreError)
        with fits, Store(path) as store:
            turn(store, StampedEngine(), some_ids(40), "chat")
            turn(store, engine, some_ids(40), "chat")
        assert engine.positions == [39] or length > 500
