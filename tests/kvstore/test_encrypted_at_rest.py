"""Nothing of a conversation stands in the files of an encrypted store, whatever was done with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.calibration import pack_calibration
from kvsnap.formats.errors import NotFound
from kvsnap.formats.identity import root_of
from kvsnap.kvstore import break_even, sqlite
from kvsnap.kvstore.explain.explain import explain
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sqlite import connect, open_connection
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import flip
from kvsnap.testing.untaught import untaught
from tests.sealed_places import (
    ARCHITECTURE,
    BLOCK,
    MODEL,
    NAME,
    WEIGHTS,
    Told,
    assert_nothing_told,
    assert_told,
    engine,
    everything,
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE, BOB

IDS = secret_ids(6 * BLOCK + 9, 1)
OTHER = np.concatenate([IDS[: 2 * BLOCK], secret_ids(3 * BLOCK + 5, 2)])
KINDS = {"rows": {}, "window": {"window": 24}, "recurrent": {"recurrent": 40}}
CODECS = ("raw", "zstd")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What the sessions of these tests have, with the digests that their files have in a plain store."""
    found = Told(ids=[IDS, OTHER])
    found.texts += [WEIGHTS, ARCHITECTURE, "another-name", "a-branch"]
    found.add_rows(IDS)
    folder = tmp_path_factory.mktemp("plain")
    for codec in CODECS:
        with open_encrypted(folder / codec, encrypt=False) as store:
            for ids, name in ((IDS, NAME), (OTHER, "another-name")):
                kept = save(store, ids, name, ALICE, codec=codec)
            kept.branch("a-branch", 40)
            found.digests.add(bytes.fromhex(root_of(kept.root.identity).root_id))
        found.add_plain(folder / codec)
    return found


def saved(store: Store, codec: str = "raw") -> None:
    save(store, IDS, NAME, ALICE, codec=codec)
    save(store, OTHER, "another-name", ALICE, codec=codec)


def saves(store: Store) -> None:
    saved(store, "zstd")


def saves_raw(store: Store) -> None:
    saved(store)


def saves_again(store: Store) -> None:
    saved(store)
    save(store, IDS[:70], NAME, ALICE)
    save(store, np.concatenate([IDS[:70], OTHER[:40]]), NAME, ALICE)


def saves_blocks_only(store: Store) -> None:
    save(store, IDS, None, ALICE)


def saves_in_the_background(store: Store) -> None:
    with Session(store, engine(), NAME, tenant=ALICE) as session:
        for stop in (30, 60, len(IDS)):
            session.resume(IDS[:stop])
            held = len(session.engine.token_ids())
            session.engine.evaluate(IDS[held:stop])
            session.save_soon({"model": MODEL})


def pins(store: Store) -> None:
    saved(store)
    store.pins.pin_session(ALICE.tenant_id, NAME)
    store.pins.pin_session(ALICE.tenant_id, "another-name", seconds=1000)
    store.pins.pin_block(store.sessions.load(ALICE.tenant_id, NAME).record.chain[3])
    save(store, np.concatenate([IDS, OTHER]), NAME, ALICE)


def branches_and_truncates(store: Store) -> None:
    kept = save(store, IDS, NAME, ALICE)
    kept.branch("a-branch", 40)
    kept.truncate(50)
    kept.save()


def recompresses(store: Store) -> None:
    saved(store)
    recompress(store, NAME, get_codec("zstd"), ALICE)
    recompress(store, "another-name", get_codec("q8"), ALICE)
    save(store, IDS, "a-branch", ALICE, codec="q4")


def removes_and_evicts(store: Store) -> None:
    saved(store)
    store.sessions.remove(ALICE.tenant_id, "another-name")
    with open_encrypted(store.path, capacity=36_000) as small:
        gc(small)
        save(small, OTHER, "another-name", ALICE)


def meets_damage(store: Store) -> None:
    saved(store)
    files = sorted(store.path.glob("blocks/*/*"))
    for path in files[:3]:
        flip(path, -5)
    flip(store.sessions.path(ALICE.tenant_id, NAME), 900)
    with open_encrypted(store.path) as again:
        assert verify_store(again, ALICE).bad
        save(again, IDS, NAME, ALICE)
        save(again, OTHER, "another-name", ALICE)
    assert list(store.path.glob("quarantine/*.reason"))


def is_built_anew(store: Store) -> None:
    saved(store)
    store.pins.pin_session(ALICE.tenant_id, NAME)
    store.close()
    for path in store.path.glob("index.sqlite3*"):
        path.unlink()
    with open_encrypted(store.path) as again:
        restored(again, IDS, NAME, tenant=ALICE)
    with open_encrypted(store.path) as again:
        list(again.listing)


def is_looked_at(store: Store) -> None:
    saved(store)
    with open_encrypted(store.path, ram="1MB") as again:
        session = Session(again, engine(), NAME, tenant=ALICE)
        session.resume(IDS)
        assert len(list(again.listing)) == 2
        explain(session, OTHER, check=True)
        stats(again, ALICE)
        verify_store(again, ALICE)
        again.index.write_notes()


def keeps_states(store: Store) -> None:
    for name, kind in KINDS.items():
        model = engine(**kind)
        session = Session(store, model, name, tenant=ALICE)
        model.evaluate(IDS[:40])
        session.checkpoint()
        model.evaluate(IDS[40:])
        session.save({"model": MODEL})


LIVES: dict[str, Callable[[Store], None]] = {
    does.__name__: does
    for does in (
        saves,
        saves_raw,
        saves_again,
        saves_blocks_only,
        saves_in_the_background,
        pins,
        branches_and_truncates,
        recompresses,
        removes_and_evicts,
        meets_damage,
        is_built_anew,
        is_looked_at,
        keeps_states,
    )
}


@pytest.mark.parametrize("life", LIVES)
def test_nothing_of_a_conversation_is_told(tmp_path: Path, told: Told, life: str) -> None:
    with open_encrypted(tmp_path / "s") as store:
        LIVES[life](store)
        # While it is open there is a log beside the index.
        assert_nothing_told(told, tmp_path)
    assert_nothing_told(told, tmp_path)
    assert len(list(tmp_path.glob("s/blocks/*/*"))) >= 5


@pytest.mark.parametrize("codec", CODECS)
def test_the_same_look_finds_all_of_it_in_a_plain_store(
    tmp_path: Path, told: Told, codec: str
) -> None:
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        saved(store, codec)
        store.pins.pin_session(ALICE.tenant_id, NAME)
    texts = [text for text in told.texts if text != "a-branch"]
    rows = told.raw if codec == "raw" else []
    assert_told(Told(texts, told.ids, told.digests, rows), tmp_path)
    named = [line for line in leaks(Told([NAME]), everything(tmp_path)) if "pins/" in line]
    assert named, "a pin has the session's name"


CHILD = """
import os, signal, sys
from pathlib import Path
from kvsnap.kvstore import space
from tests.sealed_places import NAME, open_encrypted, save, secret_ids
from tests.tenants import ALICE

left, real = int(sys.argv[2]), space.Room.publish

def publish(room, db, target):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(room, db, target)

space.Room.publish = publish
with open_encrypted(Path(sys.argv[1])) as store:
    save(store, secret_ids(6 * 16 + 9, 1), NAME, ALICE, codec="raw")
"""


@pytest.mark.parametrize("published", [0, 3, 6])
def test_nothing_is_told_by_what_a_killed_save_leaves(
    tmp_path: Path, told: Told, published: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "s"), str(published)],
        check=False,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = list(tmp_path.glob("s/tmp/*.part"))
    assert left, "it was killed with an unfinished file"
    assert any(path.stat().st_size > 1000 for path in left)
    assert_nothing_told(told, tmp_path)
    with open_encrypted(tmp_path / "s") as store:
        assert restored(store, IDS, tenant=ALICE) == min(published, 6) * BLOCK
        save(store, IDS, NAME, ALICE)
    assert_nothing_told(told, tmp_path)


def test_what_measures_and_teaches_a_model_names_it(tmp_path: Path, told: Told) -> None:
    """A calibration has nobody's text, and a record of break-even neither: they stand in the clear."""
    with open_encrypted(tmp_path / "s") as store:
        taught = untaught(engine().layout, WEIGHTS)
        store.calibrations.put(taught)
        save(store, IDS, NAME, ALICE, codec="kvtc")
        record = {"model": MODEL, "codec": "raw", "machine": "m", "measured": 1}
        curves = {"prefill": [[0, 0.0], [100, 1.0]], "restore": {}}
        settings = json.loads((store.path / "kvsnap.json").read_text())
        key = break_even.key_of(root_of(_identity(store)).identity)
        settings["break_even"] = {key: {**record, **curves}}
        (store.path / "kvsnap.json").write_text(json.dumps(settings))
    told.digests.discard(bytes.fromhex(pack_calibration(taught).file_digest))
    found = leaks(told, everything(tmp_path))
    elsewhere = [f for f in found if "in s/calibrations/" not in f and "in s/kvsnap.json" not in f]
    assert elsewhere == []
    assert any(f"{MODEL!r} in s/kvsnap.json" in line for line in found)
    assert any(f"{WEIGHTS!r} in s/calibrations/" in line for line in found)


def _identity(store: Store) -> str:
    return Session(store, engine(), tenant=ALICE).root.identity


def test_what_is_deleted_from_the_index_is_overwritten_in_it(tmp_path: Path) -> None:
    """Also by an SQLite that was built to leave it: python.org's is."""

    def forgetful(*args: object, **options: object) -> object:
        opened = open_connection(*args, **options)  # type: ignore[arg-type]
        opened.execute("PRAGMA secure_delete = OFF")
        return opened

    with mock.patch.object(sqlite, "open_connection", forgetful):
        db = connect(tmp_path / "index.sqlite3")
        db.execute("CREATE TABLE t(x)")
        db.executemany("INSERT INTO t VALUES (?)", [(f"secret number {n:09}",) for n in range(50)])
        db.execute("DELETE FROM t WHERE rowid > 10")
        db.close()
    assert b"secret number 000000003" in (tmp_path / "index.sqlite3").read_bytes()
    assert b"secret number 000000033" not in (tmp_path / "index.sqlite3").read_bytes()


def test_without_the_key_nobody_gets_anything(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store:
        saved(store)
    for tenant in (None, BOB):
        with open_encrypted(tmp_path / "s") as store:
            assert restored(store, IDS, NAME, tenant=tenant) == 0
            with pytest.raises(NotFound):
                Session(store, engine(), NAME, tenant=tenant).stored_token_ids()
            assert [listed.facts.name for listed in store.listing] == [None, None]
    with open_encrypted(tmp_path / "s") as store:
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
