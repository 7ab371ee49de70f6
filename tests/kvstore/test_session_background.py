"""Saves in the background: what was held at the call is stored, in order, and no error gets lost."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.errors import (
    NotAllStored,
    NotFound,
    SessionMoved,
    StoreError,
    StoreFull,
    UsageError,
)
from kvsnap.kvstore.background import MOST_BLOCKS
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.faults import WRITES, failing
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


class Gate:
    """Holds back every session file of a store until it is opened."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        publish = store.sessions.publish

        def wait(*args: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return publish(*args)

        monkeypatch.setattr(store.sessions, "publish", wait)


def stored(store: Store, name: str = "chat") -> list[int]:
    """The ids of a session, whose rows a fresh engine has compared with the stamps."""
    engine = StampedEngine()
    session = Session(store, engine, name)
    ids = session.stored_token_ids().tolist()
    assert session.resume(ids, leave=0).reused_tokens == len(ids)
    engine.check_rows()
    return ids


@pytest.mark.parametrize("tokens", [5, 40, 64, 75])
def test_the_engine_goes_on_while_what_it_held_is_written(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    store, ids = open_store(), some_ids(tokens)
    gate = Gate(store, monkeypatch)
    session = Session(store, StampedEngine(), "chat")
    session.engine.evaluate(ids)
    session.save_soon({"turn": 1})
    assert gate.reached.wait(60)
    session.resume(some_ids(90, seed=7))  # another text in place of what is being written
    session.engine.evaluate(some_ids(90, seed=7)[len(session.engine.token_ids()) :])
    with pytest.raises(NotFound):
        Session(open_store(), StampedEngine(), "chat").stored_token_ids()
    gate.open.set()
    report = session.flush()
    assert report is not None
    assert (report.tokens, report.revision, report.blocks_written) == (tokens, 1, tokens // 16)
    assert stored(open_store()) == ids.tolist()
    assert open_store().sessions.load("default", "chat").record.notes == {"turn": 1}
    assert session.save().revision == 2
    assert stored(open_store()) == some_ids(90, seed=7).tolist()


def test_a_later_save_waits_for_the_earlier_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(store, monkeypatch)
    session = Session(store, StampedEngine(), "chat")
    session.engine.evaluate(some_ids(20))
    session.save_soon()
    session.engine.evaluate(some_ids(20, seed=1))
    later = threading.Thread(target=session.save_soon)
    later.start()
    assert gate.reached.wait(60)
    later.join(0.05)
    assert later.is_alive()
    gate.open.set()
    later.join()
    report = session.flush()
    assert report is not None
    assert (report.revision, report.tokens) == (2, 40)


ACTION = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 50)),
    st.tuples(st.just("truncate"), st.integers(0, 80)),
    st.tuples(st.sampled_from(["save", "soon", "flush", "new"]), st.just(0)),
)


@settings(max_examples=40)
@given(actions=st.lists(ACTION, min_size=1, max_size=12))
def test_any_order_of_calls_stores_what_was_held_at_the_last_save(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("store") / "s"
    engine = StampedEngine(batch=64)
    last: list[int] | None = None
    with Store(path) as store:
        session = Session(store, engine, "chat")
        for number, (action, amount) in enumerate(actions):
            if action == "grow":
                engine.evaluate(some_ids(amount, seed=number))
            elif action == "truncate":
                session.truncate(min(amount, engine.held))
            elif action == "flush":
                session.flush()
            elif action == "new":
                session.close()
                session = Session(store, engine, "chat")
                session.resume(engine.token_ids(), leave=0)
            else:
                session.save() if action == "save" else session.save_soon()
                last = engine.token_ids().tolist()
        session.close()
        engine.check_rows()
    with Store(path) as store:
        if last is None:
            with pytest.raises(NotFound):
                stored(store)
        else:
            assert stored(store) == last
        assert verify_store(store).bad == []


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, StoreFull), (errno.EIO, StoreError)], ids=["full", "broken"]
)
@pytest.mark.parametrize("asked", ["flush", "close", "save", "save_soon"])
def test_what_went_wrong_is_raised_once_by_whoever_asks_next(
    open_store: Opener, code: int, kind: type[StoreError], asked: str
) -> None:
    session = Session(open_store(), StampedEngine(), "chat")
    session.engine.evaluate(some_ids(40))
    with failing(*WRITES, error=code) as met:
        session.save_soon()
        session._background._thread.shutdown()  # type: ignore[union-attr]
        session._background._thread = None
    assert met
    with pytest.raises(kind) as told:
        getattr(session, asked)()
    assert told.value.hint
    assert session.flush() is None
    with pytest.raises(NotFound):
        stored(open_store())
    session.save_soon()
    session.close()
    assert stored(open_store()) == some_ids(40).tolist()


def test_a_session_that_moved_in_the_background_goes_on_under_its_new_name(
    open_store: Opener,
) -> None:
    session = Session(open_store(), StampedEngine(), "chat")
    session.engine.evaluate(some_ids(40))
    turn(open_store(), StampedEngine(), some_ids(20, seed=3), "chat")
    session.save_soon()
    with pytest.raises(SessionMoved, match="chat@2") as moved:
        session.flush()
    assert moved.value.report.session == session.name == "chat@2"  # type: ignore[attr-defined]
    session.engine.evaluate(some_ids(10, seed=1))
    session.save_soon()
    report = session.flush()
    assert report is not None
    assert (report.session, report.revision) == ("chat@2", 2)
    assert len(stored(open_store(), "chat@2")) == 50
    assert stored(open_store(), "chat") == some_ids(20, seed=3).tolist()


@pytest.mark.parametrize(("blocks", "room"), [(2, 1.8), (20, 11.5)])
def test_a_full_store_keeps_the_conversation_and_the_blocks_that_fit(
    opened: Callable[..., Store], blocks: int, room: float
) -> None:
    """2 blocks: the rows are written by the thread; 20: more than may wait in memory."""
    store = opened(blocks=room)
    session = Session(store, StampedEngine(), "chat", codec="raw")
    ids = some_ids(blocks * 16)
    session.engine.evaluate(ids)
    session.save_soon()
    with pytest.raises(NotAllStored) as told:
        session.flush()
    assert told.value.report.blocks == blocks  # type: ignore[attr-defined]
    assert 0 < told.value.report.blocks_stored < blocks  # type: ignore[attr-defined]
    assert Session(store, StampedEngine(), "chat").stored_token_ids().tolist() == ids.tolist()


def test_few_blocks_wait_in_memory_and_the_engine_is_left_alone_afterwards(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(store, monkeypatch)
    engine, asked = StampedEngine(batch=64), list[tuple[int, int]]()
    export = engine.export

    def noted(start: int, stop: int) -> Any:
        asked.append((start, stop))
        return export(start, stop)

    session = Session(store, engine, "chat")
    engine.evaluate(some_ids(30 * 16 + 5))
    monkeypatch.setattr(engine, "export", noted)
    session.save_soon()
    assert asked[-1] == (22 * 16, 30 * 16)
    assert max(stop - start for start, stop in asked) <= MOST_BLOCKS * 16
    assert store.blocks.has(session._writer.chain()[21].name)
    calls = len(asked)
    gate.open.set()
    session.flush()
    assert len(asked) == calls
    assert len(stored(store)) == 30 * 16 + 5


def test_what_it_stands_on_is_not_evicted_before_it_is_written(
    opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(blocks=9)
    session = turn(store, StampedEngine(), some_ids(64), "chat", codec="raw").session
    session.engine.evaluate(some_ids(5, seed=1))
    gate = Gate(store, monkeypatch)
    session.save_soon()
    assert gate.reached.wait(60)
    other = opened(blocks=9)
    for seed in (5, 6, 7):
        with contextlib.suppress(StoreFull):
            turn(other, StampedEngine(), some_ids(64, seed), codec="raw")
    gate.open.set()
    session.flush()
    assert len(stored(opened(blocks=9))) == 69


def test_a_block_that_was_damaged_meanwhile_is_an_error_and_the_next_save_mends_it(
    open_store: Opener, store_path: Path
) -> None:
    store = open_store()
    session = turn(store, StampedEngine(), some_ids(200), "chat").session
    assert session.stored is not None
    next(store_path.rglob(f"blocks/*/{session.stored.record.chain[0].hex()}*")).unlink()
    session.engine.evaluate(some_ids(5, seed=1))
    session.save_soon()
    with pytest.raises(StoreError, match="damaged while its session was saved"):
        session.flush()
    assert len(Session(open_store(), StampedEngine(), "chat").stored_token_ids()) == 200
    session.save_soon()
    session.flush()
    assert len(stored(open_store())) == 205


def test_a_context_manager_waits_for_the_save(open_store: Opener) -> None:
    with Session(open_store(), StampedEngine(), "chat") as session:
        session.engine.evaluate(some_ids(40))
        session.save_soon()
    assert stored(open_store()) == some_ids(40).tolist()


def test_a_context_manager_raises_what_went_wrong_beside_the_callers_own_error(
    open_store: Opener,
) -> None:
    def saved_in_vain(own: Exception | None) -> None:
        with Session(open_store(), StampedEngine(), "chat") as session:
            session.engine.evaluate(some_ids(40))
            turn(open_store(), StampedEngine(), some_ids(20, seed=3), "chat")
            session.save_soon()
            if own is not None:
                raise own

    with pytest.raises(SessionMoved):
        saved_in_vain(None)
    with pytest.raises(ZeroDivisionError) as told:
        saved_in_vain(ZeroDivisionError())
    assert "saved or removed by another process" in told.value.__notes__[0]


PROGRAM = """
import os, signal, sys
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

session = Session(Store(sys.argv[1]), StampedEngine(batch=64), "chat")
for turn in range(int(sys.argv[2])):
    session.engine.evaluate(some_ids(40, turn))
    session.save_soon()
if sys.argv[3] == "flush":
    session.flush()
if sys.argv[3] != "exit":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["kill", "flush", "exit"])
def test_a_process_that_ends_leaves_whole_versions_only(
    open_store: Opener, store_path: Path, end: str
) -> None:
    """What was flushed is there, and what was saved before the last save; that one perhaps."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(store_path), "4", end]
    code = subprocess.run(command, check=False, timeout=120).returncode
    assert code == (0 if end == "exit" else -signal.SIGKILL)
    ids = stored(open_store())
    assert len(ids) in ((160,) if end == "flush" else (120, 160))
    assert ids == [token for turn in range(4) for token in some_ids(40, turn).tolist()][: len(ids)]
    assert verify_store(open_store()).bad == []


def test_notes_are_those_that_were_given_whatever_the_caller_does_with_them_then(
    tmp_path: Path,
) -> None:
    notes: dict[str, Any] = {"messages": ["one"]}
    with Store(tmp_path) as store, Session(store, StampedEngine(), "chat") as session:
        session.engine.evaluate(some_ids(100))
        session.save_soon(notes)
        for number in range(1000):
            notes["messages"].append(str(number))
        session.flush()
        assert session.stored is not None
        assert session.stored.record.notes == {"messages": ["one"]}
        assert verify_store(store).bad == []
        with pytest.raises(UsageError, match="must be JSON"):
            session.save_soon({"bad": {1, 2}})
