"""The same calls for models that cannot be cut at any token: they go on from state checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.kvstore.answer import Answer, generate, prefill
from kvsnap.kvstore.boundaries import boundaries
from kvsnap.kvstore.conversation import Message, Source, answered, edited_prompt, new_prompt
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.stamped_text import StampedTextEngine, forgetful
from kvsnap.testing.turns import some_ids

Opener = Callable[[], Store]
IDS = some_ids(90)
MODELS = [
    {"window": 24},
    {"recurrent": 12},
    {"window": 24, "recurrent": 12},
    {"recurrent": 12, "full": False},
]
model = pytest.mark.parametrize("options", MODELS, ids=lambda options: "+".join(options))


def grown(store: Store, options: dict[str, Any], *stops: int) -> Session:
    """A session that was saved at every stop, where checkpoints are by then."""
    session = Session(store, StampedEngine(**options), "chat")
    for stop in stops:
        session.engine.evaluate(IDS[len(session.engine.token_ids()) : stop])
        session.save_soon()
    session.flush()
    return session


def goes_on(store: Store, options: dict[str, Any], name: str, cut: int, reused: int) -> None:
    engine = StampedEngine(**options)
    session = Session(store, engine, name)
    assert session.stored_token_ids().tolist() == IDS[:cut].tolist()
    assert session.resume(IDS[:cut], leave=0).reused_tokens == reused
    engine.evaluate(IDS[reused:cut])
    engine.check_rows()
    assert engine.positions == list(range(reused, cut))


@model
@pytest.mark.parametrize(("cut", "reused"), [(30, 30), (64, 64), (75, 75), (40, 30), (20, 0)])
def test_a_branch_goes_on_from_the_last_checkpoint_in_it(
    open_store: Opener, options: dict[str, Any], cut: int, reused: int
) -> None:
    session = grown(open_store(), options, 30, 64, 75)
    session.branch("fork", cut)
    goes_on(open_store(), options, "fork", cut, reused)
    goes_on(open_store(), options, "chat", 75, 75)
    assert verify_store(open_store()).bad == []
    assert verify_session(open_store(), "default", "fork").bad == []


@model
@pytest.mark.parametrize(("cut", "reused"), [(75, 75), (64, 64), (70, 64), (20, 0)])
def test_truncate_tells_what_is_to_compute_again(
    store: Store, options: dict[str, Any], cut: int, reused: int
) -> None:
    session = grown(store, options, 30, 64, 75)
    report = session.truncate(cut)
    assert report.reused_tokens == len(session.engine.token_ids()) == reused
    session.engine.evaluate(IDS[reused:cut])
    assert session.save().tokens == cut
    goes_on(store, options, "chat", cut, cut)


@model
@settings(max_examples=15)
@given(steps=st.lists(st.integers(1, 40), min_size=1, max_size=6), waits=st.booleans())
def test_what_is_saved_in_the_background_is_what_was_held(
    tmp_path_factory: pytest.TempPathFactory,
    options: dict[str, Any],
    steps: list[int],
    waits: bool,
) -> None:
    with Store(tmp_path_factory.mktemp("store") / "s") as store:
        engine = StampedEngine(batch=64, **options)
        with Session(store, engine, "chat") as session:
            for number, step in enumerate(steps):
                engine.evaluate(some_ids(step, number))
                session.save_soon()
                if waits:
                    session.flush()
        ids = engine.token_ids()
        fresh = StampedEngine(**options)
        again = Session(store, fresh, "chat")
        assert again.stored_token_ids().tolist() == ids.tolist()
        assert again.resume(ids, leave=0).reused_tokens == len(ids)
        fresh.check_rows()
        assert verify_store(store).bad == []


SYSTEM: list[Message] = [{"role": "system", "content": "you help people with bicycles " * 3}]


@model
def test_chats_go_their_own_way_after_the_system_prompt_and_before_an_answer(
    open_store: Opener, options: dict[str, Any]
) -> None:
    """The template drops thoughts: the answer is written differently from the next turn on."""

    def ask(session: Session, engine: StampedTextEngine, prompt: Any) -> int:
        result, places = Answer(), boundaries(engine, prompt)
        report = prefill(session, engine, prompt.token_ids, result, places=places)
        for _ in generate(engine, prompt.token_ids, result, max_tokens=20):
            pass
        session.save(answered(prompt, engine, result.new_ids, result.ended).notes("m"))
        engine.check_rows()
        assert result.computed_tokens == len(prompt.token_ids) - report.reused_tokens
        return report.reused_tokens

    def new_engine() -> StampedTextEngine:
        return StampedTextEngine(forgetful, thinks=True, **options)

    engine, store = new_engine(), open_store()
    messages = [*SYSTEM, {"role": "user", "content": "hello"}]
    prompt = new_prompt(engine, Source(messages=messages), answer=True)
    session = Session(store, engine, "chat")
    assert ask(session, engine, prompt) == 0

    system, user = boundaries(engine, prompt)
    engine = new_engine()
    other = [*SYSTEM, {"role": "user", "content": "where"}]
    prompt = new_prompt(engine, Source(messages=other), answer=True)
    assert ask(Session(open_store(), engine, "other"), engine, prompt) >= system

    engine = new_engine()
    session = Session(open_store(), engine, "chat")
    assert session.stored is not None
    prompt = edited_prompt(engine, session.stored.record, 2, "quite another answer")
    assert session.resume(prompt.token_ids, leave=0).reused_tokens >= user
