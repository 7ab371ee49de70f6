"""Whole files of kinds, codecs and sizes that this version does not know, and pickles anywhere."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.container import Tensor, pack, parse
from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore import files
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(65)


def rewrite(path: Path, **metadata: str) -> None:
    """The same file with other header fields, right by its own digest."""
    container = parse(files.read_whole(path))
    tensors = [(name, Tensor(t.dtype, t.shape, t.data)) for name, t in container.tensors.items()]
    packed = pack({**container.metadata, **metadata}, tensors)
    data = b"".join(bytes(buffer) for buffer in packed.buffers)
    path.write_bytes(data)


def third_block(store: Store) -> Path:
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 32")
    return store.place.block(name)


@pytest.mark.parametrize(
    "metadata",
    [{"codec": "fp8"}, {"codec": "os:system"}, {"kvsnap": "9"}],
    ids=str,
)
def test_a_kind_that_is_not_known_is_a_miss_and_the_file_stays(
    open_store: Opener, metadata: dict[str, str]
) -> None:
    # A57: an older reader meets a newer writer; the others of the chain are unaffected.
    store = open_store()
    turn(store, StampedEngine(), IDS)
    path = third_block(store)
    rewrite(path, **metadata)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS, save=False).resumed
    assert engine.positions == list(range(32, 65))
    assert len(done.damage) == 1
    assert path.exists()
    assert not list(store.place.quarantine.glob("*"))
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert [bad.path for bad in report.bad] == [str(path)]


@pytest.mark.parametrize("fidelity", ["int4", "q8@1", ""])
def test_a_block_that_lies_about_its_fidelity_is_set_aside(
    open_store: Opener, fidelity: str
) -> None:
    # No writer of any version gives that: fidelity decides the name, and this one is an exact one's.
    store = open_store()
    turn(store, StampedEngine(), IDS)
    path = third_block(store)
    rewrite(path, fidelity=fidelity)
    assert [bad.path for bad in verify_store(open_store()).bad] == [str(path)]
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS).resumed
    assert engine.positions == list(range(32, 65))
    assert len(done.damage) == 1
    assert list(store.place.quarantine.glob("*"))
    assert verify_store(open_store()).bad == []


@pytest.mark.parametrize("size", [2**32 + 5, 2**42])
def test_a_file_of_absurd_size_is_a_miss_and_is_not_read(open_store: Opener, size: int) -> None:
    # A58, and a hostile neighbour: memory must not follow what a file claims to be.
    store = open_store()
    turn(store, StampedEngine(), IDS)
    os.truncate(third_block(store), size)
    engine = StampedEngine()
    turn(open_store(), engine, IDS, "chat", save=False)
    assert engine.positions == list(range(32, 65))
    engine.check_rows()


def test_sessions_take_no_more_room_than_their_rows(open_store: Opener) -> None:
    # A59: 300 tokens must not store a whole context's logits; a turn writes only what is new.
    engine = StampedEngine(layers=4, kv_heads=8, head_dim=64, capacity=1000)
    store = open_store()
    row = engine.layout.token_bytes()
    session = turn(store, engine, some_ids(304), "chat", codec="raw").session
    total = sum(p.stat().st_size for p in store.path.rglob("*.safetensors"))
    assert 304 * row < total < 1.05 * 304 * row
    engine.evaluate(some_ids(64, seed=2))
    assert session.save().bytes_written < 1.05 * 64 * row


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return subprocess.call, (["touch", self.path],)


@pytest.mark.parametrize("where", ["block", "session", "index", "settings", "temporary", "all"])
def test_a_pickle_anywhere_in_the_store_is_never_loaded(
    open_store: Opener, store_path: Path, tmp_path: Path, where: str
) -> None:
    # A66
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
        block = third_block(store)
    places = {
        "block": [block],
        "session": list(store_path.glob("sessions/*/*")),
        "index": [store_path / "index.sqlite3"],
        "settings": [store_path / "kvsnap.json"],
        "temporary": [store_path / "tmp" / "x.part"],
    }
    chosen = [p for paths in places.values() for p in paths] if where == "all" else places[where]
    for path in chosen:
        path.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    for name in ("chat", None):
        engine = StampedEngine()
        store = open_store()
        turn(store, engine, IDS, name)
        engine.check_rows()
        list(store.listing)
        verify_store(store, progress=lambda done, total: None)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("target", ["blocks", "sessions", "tmp", "quarantine"])
def test_nothing_outside_the_store_is_changed_through_links_in_it(
    open_store: Opener, store_path: Path, tmp_path: Path, target: str
) -> None:
    # A69: whoever can plant a link in the store could as well write there; others' files stay.
    turn(open_store(), StampedEngine(), IDS, "chat")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("mine")
    (store_path / target).mkdir(exist_ok=True)
    path = store_path / target / "link"
    path.symlink_to(outside, target_is_directory=True)
    (store_path / target / "file").symlink_to(outside / "mine")
    engine = StampedEngine()
    store = open_store()
    turn(store, engine, IDS, "chat")
    verify_store(store, progress=lambda done, total: None)
    list(store.listing)
    assert engine.positions == [64]
    assert [p.name for p in outside.iterdir()] == ["mine"]
    assert (outside / "mine").read_text() == "mine"


def test_a_session_file_of_another_tenant_in_ones_folder_is_refused(open_store: Opener) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS, "chat")
    path = store.sessions.path("default", "chat")
    rewrite(path, tenant_id="0" * 64)
    with pytest.raises(KvsnapError):
        store.sessions.load("default", "chat")


def test_notes_never_hold_more_than_json(open_store: Opener) -> None:
    session = turn(open_store(), StampedEngine(), IDS, "chat", save=False).session
    notes = {"deep": json.loads("[" * 50 + "]" * 50)}
    session.save(notes)
    assert open_store().sessions.load("default", "chat").record.notes == notes
