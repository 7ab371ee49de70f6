"""Going back: what the engine holds and what the next save stores end at the same token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.errors import UsageError
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn


@pytest.mark.parametrize("tokens", [0, 1, 16, 33, 64, 75])
def test_a_truncated_session_is_saved_and_resumed_as_that(store: Store, tokens: int) -> None:
    engine, ids = StampedEngine(), some_ids(75)
    session = turn(store, engine, ids, "chat").session
    report = session.truncate(tokens)
    assert report.reused_tokens == report.prompt_tokens == engine.held == tokens
    engine.check_rows()
    saved = session.save()
    assert (saved.tokens, saved.blocks_written, saved.revision) == (tokens, 0, 2)
    assert Session(store, engine, "chat").stored_token_ids().tolist() == ids[:tokens].tolist()
    assert engine.evaluated == 75


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=5),
)
def test_any_edits_leave_the_rows_of_the_last_text(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]]
) -> None:
    engine = StampedEngine(batch=64)
    with Store(tmp_path_factory.mktemp("store") / "s") as store:
        session, ids = Session(store, engine, "chat"), list[int]()
        for number, (keep, more) in enumerate(steps):
            session.truncate(min(keep, len(ids)))
            new = some_ids(more, seed=number)
            engine.evaluate(new)
            ids = [*ids[:keep], *new.tolist()]
            session.save()
        engine.check_rows()
        fresh = StampedEngine()
        again = Session(store, fresh, "chat")
        assert again.stored_token_ids().tolist() == ids
        assert again.resume(ids, leave=0).reused_tokens == len(ids)
        fresh.check_rows()


@pytest.mark.parametrize("tokens", [-1, 76])
def test_more_than_the_engine_holds_is_refused(store: Store, tokens: int) -> None:
    engine = StampedEngine()
    session = turn(store, engine, some_ids(75), "chat").session
    with pytest.raises(UsageError, match="75 tokens"):
        session.truncate(tokens)
    assert engine.held == 75


def test_another_sessions_conversation_is_not_cut(open_store: Callable[[], Store]) -> None:
    engine, store = StampedEngine(), open_store()
    alice = turn(store, engine, some_ids(40, 1), "alice").session
    turn(store, engine, some_ids(40, 2), "bob")
    with pytest.raises(UsageError, match="another conversation than session 'alice'"):
        alice.truncate(10)
    assert engine.held == 40


def test_an_edit_reuses_what_is_before_it(store: Store) -> None:
    engine, ids = StampedEngine(), some_ids(75)
    session = turn(store, engine, ids, "chat").session
    edited = [*ids[:41], *some_ids(20, seed=9)]
    report = session.resume(edited)
    assert report.reused_tokens == 41
    engine.evaluate(some_ids(20, seed=9))
    assert engine.positions == [*range(75), *range(41, 61)]
    assert session.save().blocks_written == 1
