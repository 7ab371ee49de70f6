"""Sessions by name and revision: nobody's save replaces a revision that it did not start from."""

from __future__ import annotations

import stat
import threading
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import NotFound, SessionMoved, UsageError
from kvsnap.formats.session_name import session_file_name
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]

# A07: names that a careless escape takes for one another; A18: long ones and other alphabets.
NAMES = [
    *("org/model-SEP-name", "org/model/name", "a/b", "a_b", "a--b", "a%2fb", "x@y", "x@2", "a:b"),
    *(".hidden", "dot.", "space ", "space", " space", "Case", "case", "CON", "con", "nul.txt"),
    *("../x", "/abs", "a/../../b", "..%2f", "C:x", "%~ab", "-", "%", "~", "é", "e\u0301"),
    *("n" * 189, "n" * 190, "n" * 255, "n" * 1008, "N" * 255, "語" * 84, "語" * 85, "語" * 336),
    *("🦙" * 252, "a" * 1000 + "1", "a" * 1000 + "2"),
]


def test_every_legal_name_is_a_session_of_its_own(open_store: Opener, store_path: Path) -> None:
    for number, name in enumerate(NAMES):
        saved = turn(open_store(), StampedEngine(), some_ids(3, seed=number), name).saved
        assert saved is not None
        assert (saved.session, saved.revision) == (name, 1)
    for number, name in enumerate(NAMES):
        session = Session(open_store(), StampedEngine(), name)
        assert session.stored_token_ids().tolist() == some_ids(3, seed=number).tolist()
    files = list((store_path / "sessions").rglob("*"))
    assert len([f for f in files if f.is_file()]) == len(NAMES)
    assert {f.parent.name for f in files if f.is_file()} == {"default"}
    listed = {item.facts.name for item in open_store().listing}
    assert listed == set(NAMES)


@given(st.lists(st.text("ABab019/@.:%_- ", min_size=1, max_size=30), min_size=2, unique=True))
def test_names_stay_apart_where_a_file_system_folds_case_and_accents(names: list[str]) -> None:
    # A07 with random names.
    folded = {unicodedata.normalize("NFC", session_file_name(n)).casefold() for n in names}
    assert len(folded) == len(names)
    assert all("/" not in name and len(name.encode()) <= 255 for name in folded)


@pytest.mark.parametrize("name", ["", "n" * 1025, "a\0b", "a\nb", "\ud800", "\x1b[31m"])
def test_names_that_nobody_can_type_or_read_are_refused(store: Store, name: str) -> None:
    with pytest.raises(UsageError):
        Session(store, StampedEngine(), name)


def test_revisions_count_the_saves(store: Store) -> None:
    engine = StampedEngine()
    session = Session(store, engine, "chat")
    for revision in (1, 2, 3):
        engine.evaluate(some_ids(10, seed=revision))
        assert session.save().revision == revision
    assert store.sessions.version("default", "chat")[0] == 3


@pytest.mark.parametrize("first", [None, 20])
def test_of_two_concurrent_saves_the_second_is_stored_beside(
    open_store: Opener, first: int | None
) -> None:
    if first:
        turn(open_store(), StampedEngine(), some_ids(first), "chat")
    sessions = []
    for seed in (1, 2, 3):
        session = Session(open_store(), StampedEngine(), "chat")
        session.engine.evaluate(some_ids(33, seed))
        sessions.append(session)
    sessions[0].save()
    for session, name in zip(sessions[1:], ("chat@2", "chat@3"), strict=True):
        with pytest.raises(SessionMoved, match=name) as moved:
            session.save()
        assert moved.value.stored_as == name
        assert moved.value.exit_code == 3
    for seed, name in ((1, "chat"), (2, "chat@2"), (3, "chat@3")):
        engine = StampedEngine()
        session = Session(open_store(), engine, name)
        assert session.stored_token_ids().tolist() == some_ids(33, seed).tolist()
        session.resume([*some_ids(33, seed), 7])
        assert engine.held == 33
        engine.check_rows()


def test_a_moved_session_goes_on_under_its_new_name(open_store: Opener) -> None:
    first, second = (Session(open_store(), StampedEngine(), "chat") for _ in range(2))
    first.save()
    second.engine.evaluate(some_ids(20))
    with pytest.raises(SessionMoved):
        second.save()
    second.engine.evaluate(some_ids(5, seed=2))
    saved = second.save()
    assert (saved.session, saved.revision) == ("chat@2", 2)
    listed = [item.facts.name for item in open_store().listing]
    assert sorted(listed) == ["chat", "chat@2"]
    assert Session(open_store(), StampedEngine(), "chat").stored_token_ids().tolist() == []


def test_many_threads_saving_one_session_lose_nothing(open_store: Opener) -> None:
    store, gate, names = open_store(), threading.Barrier(6), []

    def save(seed: int) -> None:
        session = Session(store, StampedEngine(), "chat")
        session.engine.evaluate(some_ids(20, seed))
        gate.wait()
        try:
            session.save()
            names.append(("chat", seed))
        except SessionMoved as moved:
            names.append((moved.stored_as, seed))

    threads = [threading.Thread(target=save, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in names) == ["chat", *(f"chat@{n}" for n in range(2, 7))]
    for name, seed in names:
        found = Session(open_store(), StampedEngine(), name).stored_token_ids()
        assert found.tolist() == some_ids(20, seed).tolist()


def test_a_removed_session_is_gone_and_its_blocks_stay(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), some_ids(40), "chat")
    open_store().sessions.remove("default", "chat")
    with pytest.raises(NotFound):
        Session(open_store(), StampedEngine(), "chat").stored_token_ids()
    engine = StampedEngine()
    turn(open_store(), engine, some_ids(40), "chat")
    assert engine.positions == list(range(32, 40))


def test_a_session_removed_after_it_was_opened_is_stored_beside_or_anew(store: Store) -> None:
    turn(store, StampedEngine(), some_ids(20), "chat")
    session = Session(store, StampedEngine(), "chat")
    session.engine.evaluate(some_ids(33))
    store.sessions.remove("default", "chat")
    try:
        name = session.save().session
    except SessionMoved as moved:
        name = moved.stored_as
    found = Session(store, StampedEngine(), name).stored_token_ids()
    assert found.tolist() == some_ids(33).tolist()


def test_notes_come_back_as_they_were_given(open_store: Opener) -> None:
    notes = {"text": "héllo\n🦙", "list": [1, 2.5, None, True], "": {}}
    turn(open_store(), StampedEngine(), some_ids(5), "chat", save=False).session.save(notes)
    record = open_store().sessions.load("default", "chat").record
    assert record.notes == notes


def test_sessions_with_and_without_a_key_may_have_one_name(open_store: Opener) -> None:
    keys = [None, Tenant(b"1" * 32)]
    for number, tenant in enumerate(keys):
        turn(open_store(), StampedEngine(), some_ids(9, number), "chat", tenant=tenant)
    for number, tenant in enumerate(keys):
        session = Session(open_store(), StampedEngine(), "chat", tenant=tenant)
        assert session.stored_token_ids().tolist() == some_ids(9, number).tolist()


def test_folders_are_0700_and_files_0600_whatever_the_umask(
    open_store: Opener, store_path: Path
) -> None:
    turn(open_store(), StampedEngine(), some_ids(40), "chat")
    for path in store_path.rglob("*"):
        if path.name != "kvsnap.json":  # the fixture's
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600), path
