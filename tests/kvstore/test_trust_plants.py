"""A planted block under the right name: with a trust list never used and replaced, without one used.

Every kind of file, every kind of plant, and every way to get it there.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs import calibration as registry
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from kvsnap.testing.untaught import untaught
from tests.planting import PLANTS, block_of, chain_files, plant, rows_of

IDS = some_ids(57)
MORE = np.concatenate([IDS, some_ids(3, 1)])
SOMEBODY = "ab" * 32
"""Whom the store trusts besides this machine; nothing here is theirs."""
Opener = Callable[..., Store]


@dataclass(frozen=True)
class Kind:
    """What is stored, and which file of it is planted."""

    codec: str = "zstd"
    engine: dict[str, Any] = field(default_factory=dict)
    state: bool = False


KINDS = {
    "zstd": Kind(),
    "raw": Kind("raw"),
    "q8": Kind("q8"),
    "kvtc": Kind("kvtc"),
    "state": Kind(engine={"window": 20, "recurrent": 24}, state=True),
    "bytes": Kind("raw", {"element": "rows"}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    return KINDS[request.param]


@pytest.fixture
def opened(store_path: Path) -> Iterator[Opener]:
    """As a new process opens the store, with or without a trust list."""
    stores: list[Store] = []

    def open_it(trust: tuple[str, ...] = (SOMEBODY,)) -> Store:
        stores.append(Store(store_path, trust=trust))
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def saved(store: Store, kind: Kind) -> None:
    engine = StampedEngine(**kind.engine)
    if kind.codec == "kvtc":
        identity = engine.identity(16, lambda path: "")
        store.calibrations.put(untaught(engine.layout, identity.weights))
    turn(store, engine, IDS, "chat", codec=kind.codec)


def target(store: Store, kind: Kind) -> tuple[Path, Path]:
    """The file to plant, and a genuine one beside it: the second block of a chain, or its state."""
    files = chain_files(store.path)
    states = [path for path in files if block_of(path.read_bytes()).record.is_state]
    return (states[0], files[0]) if kind.state else (files[1], files[0])


def resumed(store: Store, kind: Kind) -> StampedEngine:
    """An engine with a longer prompt, all computed that was not restored."""
    engine = StampedEngine(**kind.engine)
    turn(store, engine, MORE, "chat", save=False)
    return engine


def save_again(store: Store, kind: Kind) -> None:
    turn(store, StampedEngine(**kind.engine), IDS, "chat")


def assert_planted_rows_are_used(engine: StampedEngine, planted: bytes, kind: Kind) -> None:
    assert engine.positions == [57, 58, 59]
    with pytest.raises(AssertionError, match="wrong elements"):
        engine.check_rows()
    if not kind.state:
        held = engine.export(16, 32)
        assert all(np.array_equal(held[name], rows) for name, rows in rows_of(planted).items())


def assert_recomputed(engine: StampedEngine, store: Store, kind: Kind) -> None:
    """From the planted file on all was computed; what was restored is the block before it."""
    first = 0 if kind.state else 16
    assert engine.positions == list(range(first, 60))
    expected = engine.expected(MORE)
    own = engine.export(0, 60)
    for name, rows in own.items():
        assert np.array_equal(rows[:, first:], expected[name][:, first:])
    if not kind.state:
        front = rows_of(chain_files(store.path)[0].read_bytes())
        assert all(np.array_equal(own[name][:, :16], rows) for name, rows in front.items())


def assert_replaced(path: Path, genuine: bytes) -> None:
    now, before = block_of(path.read_bytes()), block_of(genuine)
    assert (now.content, now.signer) == (before.content, require_signing_key().public)
    assert now.signed
    now.check_content()


@pytest.mark.parametrize("how", PLANTS)
def test_a_plant_is_never_used_and_is_replaced(kind: Kind, opened: Opener, how: str) -> None:
    with opened() as store:
        saved(store, kind)
        path, beside = target(store, kind)
        genuine = plant(path, beside, PLANTS[how])
        planted = path.read_bytes()
    with opened() as store:
        assert_recomputed(resumed(store, kind), store, kind)
        save_again(store, kind)
        assert_replaced(path, genuine)
        assert verify_store(store).bad == []
        aside = [file for file in store.place.quarantine.iterdir() if file.suffix != ".reason"]
        assert [file.read_bytes() for file in aside] == [planted], "a person can look at it"
    with opened() as store:
        assert resumed(store, kind).positions == [57, 58, 59]


@pytest.mark.parametrize("how", PLANTS)
def test_without_a_trust_list_it_is_used(kind: Kind, opened: Opener, how: str) -> None:
    """The need for one: name, token ids and digests are right."""
    with opened() as store:
        saved(store, kind)
        path, beside = target(store, kind)
        plant(path, beside, PLANTS[how])
    with opened(trust=()) as store:
        assert_planted_rows_are_used(resumed(store, kind), path.read_bytes(), kind)


def index_deleted(store: Path, planted: Path, before: os.stat_result) -> None:
    for file in store.glob("index.sqlite3*"):
        file.unlink()


def times_set_back(store: Path, planted: Path, before: os.stat_result) -> None:
    os.utime(planted, ns=(before.st_atime_ns, before.st_mtime_ns))


def written_into_the_same_file(store: Path, planted: Path, before: os.stat_result) -> None:
    data = planted.read_bytes()
    with planted.open("r+b") as file:
        file.write(data)


def row_made_to_fit(store: Path, planted: Path, before: os.stat_result) -> None:
    """As somebody would who can write the index, too: length, time and signer are as told."""
    status = planted.stat()
    values = (status.st_size, status.st_ctime_ns, require_signing_key().public)
    with closing(sqlite3.connect(store / "index.sqlite3")) as db, db:
        sql = "UPDATE blocks SET bytes = ?, synced = ?, signer = ? WHERE name = ?"
        changed = db.execute(sql, (*values, bytes.fromhex(planted.name.split(".")[0])))
        assert changed.rowcount == 1


WAYS = [index_deleted, times_set_back, written_into_the_same_file, row_made_to_fit]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("how", PLANTS)
def test_whatever_is_done_to_index_and_times(
    opened: Opener, how: str, way: Callable[[Path, Path, os.stat_result], None]
) -> None:
    raw = KINDS["raw"]  # planted files have the length of genuine ones
    with opened() as store:
        saved(store, raw)
        path, beside = target(store, raw)
        before = path.stat()
        genuine = plant(path, beside, PLANTS[how])
    way(store.path, path, before)
    with opened() as store:
        assert_recomputed(resumed(store, raw), store, raw)
        save_again(store, raw)
        assert_replaced(path, genuine)
        assert verify_store(store).bad == []
