"""Two sessions on one engine: each is saved with its own tokens, or not at all."""

from __future__ import annotations

import pytest

from kvsnap.formats.errors import EngineError, SessionMoved, UsageError
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

ALICE, BOB = some_ids(40, 1), some_ids(40, 2)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("tenant", [None, Tenant(bytes(range(32)))], ids=["same", "other tenant"])
def test_a_session_is_not_saved_with_the_tokens_of_another(
    store: Store, stored: bool, tenant: Tenant | None
) -> None:
    engine = StampedEngine()
    alice = turn(store, engine, ALICE, "alice", save=stored).session
    turn(store, engine, BOB, "bob", tenant=tenant)
    with pytest.raises(UsageError, match="another conversation than session 'alice'"):
        alice.save()
    alice.resume(ALICE)
    engine.evaluate(ALICE[len(engine.token_ids()) :])
    assert alice.save().tokens == 40
    assert store.sessions.load("default", "alice").record.token_ids.tolist() == ALICE.tolist()


KEYS = [None, Tenant(bytes(range(32))), Tenant(bytes(range(1, 33)))]


@pytest.mark.parametrize("how", ["resumed", "saved", "put"])
@pytest.mark.parametrize("name", [None, "chat"])
@pytest.mark.parametrize("first", KEYS, ids=["no key", "A", "B"])
def test_what_the_engine_holds_of_another_tenant_is_not_reused(
    store: Store, first: Tenant | None, name: str | None, how: str
) -> None:
    """That a prompt is there at once would tell that somebody else asked it."""
    for asker in KEYS:
        engine = StampedEngine()
        session = Session(store, engine, name, tenant=first)
        if how == "resumed":
            session.resume(ALICE)
        engine.evaluate(ALICE[len(engine.token_ids()) :])
        if how == "saved":
            Session(store, engine, tenant=first).save()
        if how == "put":
            session.put_filled()
        engine.positions.clear()
        done = turn(store, engine, [*ALICE, 7], name, tenant=asker, save=False).resumed
        found = len(ALICE) if asker == first else 0
        assert done.reused_tokens == found
        assert engine.positions == list(range(found, 41))
        assert done.from_store == 0
        engine.check_rows()


def test_a_conversation_may_be_saved_under_a_further_name(store: Store) -> None:
    engine = StampedEngine()
    turn(store, engine, ALICE, "alice")
    assert Session(store, engine, "copy").save().blocks_written == 0
    engine.evaluate(BOB[:10])
    assert Session(store, engine, "alice").save().tokens == 50


def test_an_emptied_engine_does_not_empty_the_session(store: Store) -> None:
    engine = StampedEngine()
    alice = turn(store, engine, ALICE, "alice").session
    engine.truncate(0)
    with pytest.raises(UsageError, match="holds nothing of session 'alice'"):
        alice.save()
    assert len(store.sessions.load("default", "alice").record.token_ids) == 40


def test_an_engine_that_refuses_the_rows_computes_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(store, StampedEngine(), ALICE)
    engine = StampedEngine()

    def refuse(*_: object) -> None:
        raise EngineError("the engine did not take the restored state")

    monkeypatch.setattr(engine, "load", refuse)
    done = turn(store, engine, ALICE, save=False)
    assert (done.resumed.reused_tokens, done.computed) == (0, 40)
    assert done.resumed.damage == ("the engine did not take the restored state",)
    engine.check_rows()


def test_the_first_request_of_a_new_store_is_counted(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with Store(tmp_path / "new") as store:
        turn(store, StampedEngine(), some_ids(70), "s")
        counters = dict(store.index.query("SELECT name, value FROM counters"))
    assert (counters["requests"], counters["computed_tokens"]) == (1, 70)


def test_a_session_that_was_removed_and_saved_anew_is_not_replaced(store: Store) -> None:
    mine = turn(store, StampedEngine(), ALICE, "chat").session
    store.sessions.remove("default", "chat")
    turn(store, StampedEngine(), BOB, "chat")  # revision 1 again, and reported saved
    with pytest.raises(SessionMoved) as moved:
        mine.save()
    assert moved.value.stored_as == "chat@2"
    assert store.sessions.load("default", "chat").record.token_ids.tolist() == BOB.tolist()


def test_a_save_right_after_ours_is_not_taken_for_ours(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = turn(store, StampedEngine(), ALICE, "chat").session
    real = store.sessions.sync

    def sync_and_let_bob_save(record: SessionRecord) -> None:
        real(record)
        monkeypatch.setattr(store.sessions, "sync", real)
        turn(store, StampedEngine(), BOB, "chat")

    monkeypatch.setattr(store.sessions, "sync", sync_and_let_bob_save)
    mine.save()
    with pytest.raises(SessionMoved):
        mine.save()
    assert store.sessions.load("default", "chat").record.token_ids.tolist() == BOB.tolist()


def test_a_conflict_on_the_longest_name_is_stored_beside_it(store: Store) -> None:
    name = "n" * 1008
    first = turn(store, StampedEngine(), ALICE, name).session
    turn(store, StampedEngine(), ALICE, name)
    with pytest.raises(SessionMoved) as moved:
        first.save()
    assert store.sessions.load("default", moved.value.stored_as).record.revision == 1
