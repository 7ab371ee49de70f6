"""Whatever happens to a block file: a miss with a reason, a shorter reuse, never a wrong row."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.container import header_size
from kvsnap.formats.errors import StoreReadOnly
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import cut, flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(70)


class Canary:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return subprocess.call, (["touch", self.path],)


def header_end(path: Path) -> int:
    return header_size(path.read_bytes()[:8])


def flip_at(place: Callable[[Path], int], bits: int = 1) -> Callable[[Path], None]:
    return lambda path: flip(path, place(path), bits)


def flip_text(text: bytes, shift: int) -> Callable[[Path], None]:
    return lambda path: flip(path, path.read_bytes().index(text) + shift)


def replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def another_block(path: Path) -> None:
    """A whole and honest file, but of another name."""
    other = next(p for p in sorted(path.parents[1].glob("*/*")) if p != path)
    path.write_bytes(other.read_bytes())


def _overwrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "header length": flip_at(lambda path: 0),
    "header length, high byte": flip_at(lambda path: 7, 0x80),
    "header brace": flip_at(lambda path: 8),
    "padding": flip_at(lambda path: header_end(path) - 1),
    "name": flip_text(b'"name":"', 10),
    "parent": flip_text(b'"parent":"', 12),
    "root id": flip_text(b'"root_id":"', 13),
    "start": flip_text(b'"start":"', 9),
    "file digest": flip_text(b'"file":"', 10),
    "content digest": flip_text(b'"content":"', 13),
    "identity": flip_text(b"weights", 3),
    "version": flip_text(b'"kvsnap":"', 10),
    "codec": flip_text(b'"codec":"', 10),
    "offsets": flip_text(b'"data_offsets":[', 16),
    "shape": flip_text(b'"shape":[', 9),
    "token ids": flip_at(header_end),
    "first row": flip_at(lambda path: header_end(path) + 64),
    "last byte": flip_at(lambda path: -1, 0x80),
    "middle": flip_at(lambda path: path.stat().st_size // 2, 0xFF),
    "cut to half": lambda path: cut(path, path.stat().st_size // 2),
    "cut by one": lambda path: cut(path, path.stat().st_size - 1),
    "cut inside the header": lambda path: cut(path, 100),
    "cut inside the ids": lambda path: cut(path, header_end(path) + 6),
    "longer by one": lambda path: cut(path, path.stat().st_size + 1),
    "empty": lambda path: cut(path, 0),
    "zeros": lambda path: _overwrite(path, bytes(path.stat().st_size)),
    "seven bytes": lambda path: _overwrite(path, b"1234567"),
    "another block": another_block,
    "gone": lambda path: path.unlink(),
    "a folder": replace(lambda path: path.mkdir()),
    "a full folder": replace(lambda path: (path.mkdir(), (path / "x").write_text("x"))),
    "a link to nothing": replace(lambda path: path.symlink_to("nothing")),
    "a link to itself": replace(lambda path: path.symlink_to(path)),
    "a link to a file": replace(lambda path: path.symlink_to("/etc/passwd")),
    "a pipe": replace(os.mkfifo),
    "a pickle": replace(
        lambda path: path.write_bytes(pickle.dumps(Canary(path.parents[2] / "canary")))
    ),
}
every_damage = pytest.mark.parametrize("kind", DAMAGE)


def third_block(store: Store) -> Path:
    (name,) = (n for (n,) in store.index.query("SELECT name FROM blocks WHERE start = 32"))
    return store.place.block(name)


def damaged(open_store: Opener, kind: str, session: str | None = None) -> Path:
    """4 blocks, of which the third gets damaged."""
    store = open_store()
    turn(store, StampedEngine(), IDS[:64], session)
    path = third_block(store)
    DAMAGE[kind](path)
    return path


@every_damage
def test_reuse_ends_before_the_damaged_block_and_the_report_says_so(
    open_store: Opener, store_path: Path, kind: str
) -> None:
    # A31, A33, A34: reused = 32; nothing after it is used; no error.
    damaged(open_store, kind)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, save=False).resumed
    assert engine.positions == list(range(32, 70))
    engine.check_rows()
    assert len(done.damage) == 1
    assert done.stopped_by == f"damaged: {done.damage[0]}"
    assert not (store_path / "canary").exists()


@every_damage
def test_an_index_rebuilt_over_damage_serves_no_wrong_row(
    open_store: Opener, store_path: Path, kind: str
) -> None:
    damaged(open_store, kind)
    (store_path / "index.sqlite3").unlink()
    engine = StampedEngine()
    turn(open_store(), engine, IDS, "chat")
    assert engine.positions == list(range(32, 70))
    engine.check_rows()
    again = StampedEngine()
    turn(open_store(), again, IDS, "chat")
    assert again.positions == [69]
    again.check_rows()
    assert not (store_path / "canary").exists()


@every_damage
def test_verify_names_the_block_and_the_next_save_mends_it(open_store: Opener, kind: str) -> None:
    path = damaged(open_store, kind)
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert [bad.path for bad in report.bad] == [str(path)]
    assert report.bad[0].reason
    engine = StampedEngine()
    saved = turn(open_store(), engine, IDS, "chat").saved
    assert saved is not None
    assert saved.blocks_written == 1
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.unreachable, report.checked) == ([], [], 5)
    again = StampedEngine()
    turn(open_store(), again, IDS, "chat")
    assert again.positions == [69]
    again.check_rows()


@pytest.mark.parametrize("kind", ["middle", "gone", "cut to half", "a folder"])
def test_blocks_after_a_damaged_one_wait_and_come_back(open_store: Opener, kind: str) -> None:
    path = damaged(open_store, kind)
    turn(open_store(), StampedEngine(), IDS, save=False)
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert [bad.path for bad in report.bad] == [str(path)]
    assert len(report.unreachable) == 1
    engine = StampedEngine()
    turn(open_store(), engine, IDS[:48])
    assert engine.positions == list(range(32, 48))
    assert verify_store(open_store(), progress=lambda done, total: None).unreachable == []
    again = StampedEngine()
    turn(open_store(), again, IDS, save=False)
    assert again.positions == list(range(64, 70))
    again.check_rows()


@every_damage
def test_a_damaged_file_is_set_aside_with_its_reason_and_not_deleted(
    open_store: Opener, kind: str
) -> None:
    path = damaged(open_store, kind)
    turn(open_store(), StampedEngine(), IDS, save=False)
    aside = sorted(open_store().place.quarantine.glob("*"))
    if kind == "gone":
        assert aside == []
        return
    assert len(aside) == 2
    assert aside[0].name.startswith(path.name)
    assert aside[1].name == aside[0].name + ".reason"
    assert str(path) in aside[1].read_text()
    assert not os.path.lexists(path)


@every_damage
def test_a_session_in_the_engine_is_untouched_by_a_refused_block(
    open_store: Opener, kind: str
) -> None:
    # A31: the old answer before and after; a load that fails half-way would show in it.
    damaged(open_store, kind)
    engine, alone = StampedEngine(), StampedEngine()
    for each in (engine, alone):
        each.evaluate(some_ids(20, seed=6))
    done = Session(open_store(), engine).resume([*some_ids(20, seed=6), *IDS])
    assert done.reused_tokens == 20
    for each in (engine, alone):
        each.evaluate(some_ids(5, seed=7))
    assert engine.sample() == alone.sample()
    engine.check_rows()
    turn(open_store(), engine, IDS, save=False)
    engine.check_rows()
    cold = StampedEngine()
    cold.evaluate(IDS)
    assert engine.sample() == cold.sample()


@every_damage
def test_the_verdict_stands_within_one_process(open_store: Opener, kind: str) -> None:
    # A33: the same doomed load is not tried for ever; the second resume is not worse.
    damaged(open_store, kind)
    store = open_store()
    for _ in range(2):
        engine = StampedEngine()
        turn(store, engine, IDS, save=False)
        assert engine.positions == list(range(32, 70))
        engine.check_rows()


@pytest.mark.parametrize("number", range(4))
def test_damage_anywhere_in_the_chain_keeps_what_stands_before_it(
    open_store: Opener, number: int
) -> None:
    turn(open_store(), StampedEngine(), IDS, "chat")
    store = open_store()
    ((name,),) = store.index.query(f"SELECT name FROM blocks WHERE start = {number * 16}")
    flip(store.place.block(name), -1)
    engine = StampedEngine()
    turn(store, engine, IDS, "chat", save=False)
    assert engine.positions == list(range(number * 16, 70))
    engine.check_rows()


@pytest.mark.parametrize("number", range(7))
def test_a_verdict_that_cannot_be_written_down_still_ends_the_reuse(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """In a store that cannot be written the index goes on offering the damaged block."""
    ids = some_ids(113)
    turn(open_store(), StampedEngine(), ids)
    store, engine = open_store(), StampedEngine()
    ((name,),) = store.index.query(f"SELECT name FROM blocks WHERE start = {number * 16}")
    flip(store.place.block(name), -1)

    def refuse(**_: object) -> None:
        raise StoreReadOnly("read-only")

    monkeypatch.setattr(store.index, "transaction", refuse)
    for _ in range(2):
        engine = StampedEngine()
        turn(store, engine, ids, save=False)
        assert engine.positions == list(range(number * 16, 113))
        engine.check_rows()
    assert store.place.block(name).exists()


def test_several_damaged_blocks_are_each_told_of_once(open_store: Opener) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS)
    for (name,) in store.index.query("SELECT name FROM blocks WHERE start >= 16"):
        flip(store.place.block(name), -1)
    engine = StampedEngine()
    done = turn(store, engine, IDS, save=False).resumed
    assert engine.positions == list(range(16, 70))
    assert len(done.damage) == len(set(done.damage)) >= 1


def test_flips_all_over_a_block_file_are_seen(open_store: Opener) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS[:16], codec="raw")
    (path,) = store.place.blocks.glob("*/*")
    good = path.read_bytes()
    for offset in range(0, len(good), 61):
        flip(path, offset, 1 << offset % 8)
        engine = StampedEngine()
        with Store(store.path) as again:
            turn(again, engine, IDS[:16], save=False)
        assert engine.positions == list(range(16)), f"a flip at {offset} was not seen"
        engine.check_rows()
        for file in store.path.glob("index.sqlite3*"):
            file.unlink()
        path.write_bytes(good)
