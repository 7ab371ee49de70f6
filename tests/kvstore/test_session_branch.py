"""A branch is a session of its own from any token on: nothing is computed, no block is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.errors import NotFound, Unsupported, UsageError
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(75)
"""Four blocks of 16 and a tail of 11."""


def block_files(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("blocks/*/*")}


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 40, 63, 64, 65, 74, 75])
def test_a_branch_at_any_token_goes_on_without_computing(
    open_store: Opener, store_path: Path, cut: int
) -> None:
    engine = StampedEngine()
    session = turn(open_store(), engine, IDS, "chat").session
    computed, files = engine.evaluated, block_files(store_path)
    session.branch("fork", cut)
    assert (engine.evaluated, block_files(store_path)) == (computed, files)

    fresh, store = StampedEngine(), open_store()
    fork = Session(store, fresh, "fork")
    assert fork.stored_token_ids().tolist() == IDS[:cut].tolist()
    more = [*IDS[:cut], *some_ids(30, seed=5)]
    report = fork.resume(more)
    assert report.reused_tokens == fresh.held == cut
    fresh.check_rows()
    fresh.evaluate(some_ids(30, seed=5))
    fork.save()
    assert fresh.positions == list(range(cut, cut + 30))
    assert Session(store, fresh, "chat").stored_token_ids().tolist() == IDS.tolist()
    assert verify_store(store).bad == []


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 75), min_size=1, max_size=4), seed=st.integers(0, 9))
def test_branches_of_branches_hold_the_front_of_their_source(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
) -> None:
    engine, ids = StampedEngine(batch=64), some_ids(75, seed)
    with Store(tmp_path_factory.mktemp("store") / "s") as store:
        session, length = turn(store, engine, ids, "0").session, 75
        for number, cut in enumerate(cuts, 1):
            length = min(length, cut)
            session = session.branch(str(number), length)
            fresh = StampedEngine()
            Session(store, fresh, str(number)).resume(ids[:length], leave=0)
            assert fresh.held == length
            fresh.check_rows()
        assert engine.evaluated == 75


def test_a_branch_of_everything_takes_the_notes_over_and_one_of_less_does_not(
    store: Store,
) -> None:
    session = turn(store, StampedEngine(), IDS, "chat", save=False).session
    session.save({"text": "hello"})

    def notes(name: str) -> object:
        return store.sessions.load("default", name).record.notes

    session.branch("copy")
    session.branch("half", 40)
    session.branch("told", 40, notes={"text": "hel"})
    assert [notes(name) for name in ("copy", "half", "told")] == [
        {"text": "hello"},
        {},
        {"text": "hel"},
    ]


def test_a_branch_never_overwrites_a_session(open_store: Opener, store_path: Path) -> None:
    store = open_store()
    turn(store, StampedEngine(), some_ids(20, seed=3), "other")
    session = turn(store, StampedEngine(), IDS, "chat").session
    for name in ("other", "chat"):
        before = store.sessions.version("default", name)
        with pytest.raises(UsageError, match=f"'{name}' is there already"):
            session.branch(name, 10)
        assert store.sessions.version("default", name) == before
    damaged = store.sessions.path("default", "other")
    damaged.write_bytes(b"nothing that can be read")
    with pytest.raises(UsageError, match="is there already"):
        session.branch("other", 10)
    assert damaged.read_bytes() == b"nothing that can be read"
    assert not list(store_path.glob("tmp/*.tmp"))


def test_a_session_that_was_published_meanwhile_is_not_overwritten(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = turn(store, StampedEngine(), IDS, "chat").session
    has = store.blocks.has

    def somebody_saves(name: bytes) -> bool:
        monkeypatch.setattr(store.blocks, "has", has)
        turn(store, StampedEngine(), some_ids(20, seed=3), "fork")
        return has(name)

    monkeypatch.setattr(store.blocks, "has", somebody_saves)
    with pytest.raises(UsageError, match="is there already"):
        session.branch("fork", 40)
    assert len(store.sessions.load("default", "fork").record.token_ids) == 20


@pytest.mark.parametrize("cut", [-1, 76])
def test_a_branch_beyond_the_session_is_refused(store: Store, cut: int) -> None:
    session = turn(store, StampedEngine(), IDS, "chat").session
    with pytest.raises(UsageError, match="75 tokens"):
        session.branch("fork", cut)


def test_a_session_that_was_never_saved_has_no_branches(store: Store) -> None:
    session = turn(store, StampedEngine(), IDS, "chat", save=False).session
    with pytest.raises(NotFound, match="'chat'"):
        session.branch("fork", 5)


def test_a_branch_inside_an_evicted_block_is_refused_and_at_its_edge_it_is_not(
    open_store: Opener, store_path: Path
) -> None:
    session = turn(open_store(), StampedEngine(), IDS, "chat").session
    assert session.stored is not None
    name = session.stored.record.chain[2].hex()
    next(store_path.rglob(f"blocks/*/{name}*")).unlink()
    with pytest.raises(Unsupported, match="tokens 32 to 40") as refused:
        session.branch("fork", 40)
    assert "branch at token 32" in refused.value.hint
    session.branch("edge", 32)
    session.branch("deeper", 64)  # its file needs no rows; what is missing is computed
    engine = StampedEngine()
    assert Session(open_store(), engine, "deeper").resume(IDS[:64]).reused_tokens == 32
    engine.check_rows()


def test_a_branch_inside_a_lossy_block_is_refused_and_at_its_edge_it_is_lossy(
    store: Store,
) -> None:
    ids = some_ids(75)
    session = turn(store, StampedEngine(head_dim=32), ids, "chat", codec="q8").session
    with pytest.raises(Unsupported, match="fidelity q8"):
        session.branch("fork", 40)
    assert session.branch("edge", 32).codec.id == "q8"
    assert session.branch("end", 70).codec.id == "q8"  # the tail is stored without loss
    engine = StampedEngine(head_dim=32)
    assert Session(store, engine, "end").resume([*ids[:70], 1]).reused_tokens == 70


def test_a_branch_belongs_to_its_tenant(store: Store) -> None:
    tenant = Tenant(b"1" * 32)
    session = turn(store, StampedEngine(), IDS, "chat", tenant=tenant).session
    fork = session.branch("fork", 40)
    assert fork.stored_token_ids().tolist() == IDS[:40].tolist()
    with pytest.raises(NotFound):
        Session(store, StampedEngine(), "fork").stored_token_ids()
