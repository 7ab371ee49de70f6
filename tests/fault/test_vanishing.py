"""Files and folders that go away while somebody uses them."""

from __future__ import annotations

import contextlib
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import SessionMoved
from kvsnap.kvstore import chain_reader
from kvsnap.kvstore import match as match_module
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import cut
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(120)


def after_look_up(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once, between the look-up and the load of a resume."""
    done: list[object] = []

    def look_up(*args: object, **kwargs: object) -> object:
        found = match_module.longest_usable(*args, **kwargs)
        if not done:
            done.append(act() or True)
        return found

    monkeypatch.setattr(chain_reader, "longest_usable", look_up)


ACTS: dict[str, Callable[[Path], object]] = {
    "unlinked": lambda path: path.unlink(),
    "cut to half": lambda path: cut(path, path.stat().st_size // 2),
    "cut to nothing": lambda path: cut(path, 0),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("kind", ACTS)
@pytest.mark.parametrize("number", range(7))
def test_a_block_that_goes_between_look_up_and_load_ends_the_reuse(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    # A33, A36, A39: later blocks are neither counted nor shifted into its place.
    store = open_store()
    turn(store, StampedEngine(), IDS[:112])
    ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = ?", [16 * number])
    engine = StampedEngine()
    session = Session(store, engine)
    after_look_up(monkeypatch, lambda: ACTS[kind](store.place.block(name)))
    assert session.resume(IDS).reused_tokens == 16 * number
    engine.check_rows()
    assert session.resume(IDS).reused_tokens == 16 * number
    engine.evaluate(IDS[16 * number :])
    assert session.save().blocks_written == 1
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])


def test_a_block_removed_by_hand_is_written_again(open_store: Opener) -> None:
    # A39
    store = open_store()
    session = turn(store, StampedEngine(), IDS, "chat").session
    for path in sorted(store.place.blocks.glob("*/*"))[::2]:
        path.unlink()
    assert session.save().blocks_written == 4
    engine = StampedEngine()
    turn(open_store(), engine, IDS, "chat")
    assert engine.positions == [119]


EMPTIED: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "replaced by an empty folder": lambda path: (shutil.rmtree(path), path.mkdir(mode=0o700)),
    "moved away": lambda path: path.rename(path.with_name("away")),
    "only blocks": lambda path: shutil.rmtree(path / "blocks"),
    "all but the index": lambda path: [shutil.rmtree(p) for p in path.iterdir() if p.is_dir()],
}


@pytest.mark.parametrize("kind", EMPTIED)
def test_a_store_emptied_under_a_running_session_is_made_anew(
    open_store: Opener, store_path: Path, kind: str
) -> None:
    # A39, A50: no stale hits; the next save recreates it with the right modes.
    store = open_store()
    turn(store, StampedEngine(), IDS[:90], "chat")
    warm, cold = Session(store, StampedEngine(), "chat"), StampedEngine()
    warm.engine.evaluate(IDS[:90])
    EMPTIED[kind](store_path)
    assert turn(store, cold, IDS[:90], "new", save=False).resumed.reused_tokens == 0
    cold.check_rows()
    assert warm.resume(IDS).reused_tokens == 90
    warm.engine.evaluate(IDS[90:])
    # Where the session's file is gone as well, nobody can tell that nobody replaced it.
    with contextlib.suppress(SessionMoved):
        assert warm.save().blocks == 7
    engine = StampedEngine()
    turn(open_store(), engine, IDS, save=False)
    assert engine.positions == list(range(112, 120))
    engine.check_rows()
    for path in [store_path, *store_path.rglob("*")]:
        if path.name != "kvsnap.json":
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    report = verify_store(open_store(), progress=lambda done, total: None)
    assert (report.bad, report.unreachable) == ([], [])


def test_settings_are_kept_when_the_store_is_made_anew(
    open_store: Opener, store_path: Path
) -> None:
    """The running store has blocks of 16; it must not write a kvsnap.json that says otherwise."""
    store = open_store()
    shutil.rmtree(store_path)
    turn(store, StampedEngine(), IDS, "chat")
    assert open_store().block_size == 16
    engine = StampedEngine()
    turn(open_store(), engine, IDS, "chat")
    assert engine.positions == [119]
