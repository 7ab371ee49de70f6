"""Headers that no kvsnap writes: rebuilding the index over them passes them by, and never falls."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.container import header_size
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

HUGE = 2**62
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "metadata is a list": lambda h: h.update(__metadata__=[1]),
    "metadata is text": lambda h: h.update(__metadata__="name"),
    "metadata is missing": lambda h: h.pop("__metadata__"),
    "a number in the metadata": lambda h: h["__metadata__"].update(parent=7),
    "a name too short": lambda h: h["__metadata__"].update(name="ab"),
    "a start of 18 digits": lambda h: h["__metadata__"].update(start="9" * 18),
    "a negative start": lambda h: h["__metadata__"].update(start="-1"),
    "no token ids": lambda h: h.pop("token_ids"),
    "token ids are a list": lambda h: h.update(token_ids=[]),
    "a shape that is a number": lambda h: h["token_ids"].update(shape=16),
    "a shape of text": lambda h: h["token_ids"].update(shape=["16"]),
    "an empty shape": lambda h: h["token_ids"].update(shape=[]),
    "a huge shape": lambda h: h["token_ids"].update(shape=[HUGE], data_offsets=[0, 4 * HUGE]),
    "a negative shape": lambda h: h["token_ids"].update(shape=[-1], data_offsets=[0, -4]),
    "an odd length of ids": lambda h: h["token_ids"].update(data_offsets=[0, 6], shape=[1]),
    "offsets of text": lambda h: h["token_ids"].update(data_offsets=["0", "64"]),
    "one offset": lambda h: h["token_ids"].update(data_offsets=[64]),
    "offsets missing": lambda h: h["token_ids"].pop("data_offsets"),
    "a fraction": lambda h: h["token_ids"].update(shape=[16.0], data_offsets=[0, 64.0]),
    "another type of ids": lambda h: h["token_ids"].update(dtype="F32"),
    "a tensor that is null": lambda h: h.update(extra=None),
}


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = path.read_bytes()
    end = header_size(data[:8])
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def resume_without_index(path: Path, length: int) -> StampedEngine:
    for file in path.glob("index.sqlite3*"):
        file.unlink()
    engine = StampedEngine()
    with Store(path) as store:
        turn(store, engine, some_ids(length), save=False)
        verify_store(store, progress=lambda done, total: None)
    engine.check_rows()
    return engine


@pytest.mark.parametrize("kind", CHANGES)
def test_a_hostile_header_is_passed_by(store_path: Path, kind: str) -> None:
    with Store(store_path) as store:
        session = turn(store, StampedEngine(), some_ids(48)).session
        ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 16")
    assert session.root
    rewrite(store.place.block(name), CHANGES[kind])
    assert resume_without_index(store_path, 48).positions == list(range(16, 48))


def test_random_bytes_and_random_changes_are_passed_by(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(16))
    (path,) = store_path.glob("blocks/*/*")
    good, random_ = path.read_bytes(), random.Random(5)
    for _ in range(150):
        data = bytearray(good[: random_.choice((len(good), random_.randrange(len(good))))])
        for _ in range(random_.randrange(4)):
            if data:
                data[random_.randrange(min(len(data), 900))] = random_.randrange(256)
        path.write_bytes(data)
        wanted = [15] if data == good else list(range(16))
        assert resume_without_index(store_path, 16).positions == wanted


def test_a_shortened_file_does_not_count_as_stored_after_a_rebuild(store_path: Path) -> None:
    """As after a power cut that took index and data: the next save must write the block again."""
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(16))
    (path,) = store_path.glob("blocks/*/*")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    for file in store_path.glob("index.sqlite3*"):
        file.unlink()
    with Store(store_path) as store:
        saved = turn(store, StampedEngine(), some_ids(16)).saved
    assert saved is not None
    assert saved.blocks_written == 1
    assert path.stat().st_size == size
