"""The end of a prompt: one token is always computed, none twice, none at a wrong position."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsnap.formats.errors import DoesNotFit, EngineError, NotFound
from kvsnap.formats.names import token_array
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.engine_suite import LENGTHS
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


@pytest.mark.parametrize("length", [n for n in LENGTHS if n])
def test_the_same_prompt_again_computes_exactly_its_last_token(
    open_store: Opener, length: int
) -> None:
    # A21, A23, A24: the last token once, at its own position.
    ids = some_ids(length)
    turn(open_store(), StampedEngine(), ids, "chat")
    engine = StampedEngine()
    done = turn(open_store(), engine, ids, "chat")
    assert engine.positions == [length - 1]
    assert engine.held == length
    assert done.resumed.reused_tokens == length - 1
    assert done.resumed.stopped_by.startswith("whole prompt")
    engine.check_rows()


@pytest.mark.parametrize("blocks", range(1, 9))
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_exact_multiples_of_the_block_size_are_like_their_neighbours(
    open_store: Opener, blocks: int, more: int
) -> None:
    # A24: prompts of 16k - 1, 16k and 16k + 1 tokens against a full hit of 16k.
    ids = some_ids(16 * blocks + 1)
    turn(open_store(), StampedEngine(), ids[: 16 * blocks])
    cold, warm = StampedEngine(), StampedEngine()
    cold.evaluate(ids[: 16 * blocks + more])
    turn(open_store(), warm, ids[: 16 * blocks + more])
    assert warm.positions == [16 * blocks + more - 1]
    assert warm.sample() == cold.sample()


@pytest.mark.parametrize("length", LENGTHS)
def test_without_logits_wanted_nothing_is_computed(open_store: Opener, length: int) -> None:
    ids = some_ids(length)
    turn(open_store(), StampedEngine(), ids, "chat")
    engine = StampedEngine()
    done = Session(open_store(), engine, "chat").resume(ids, leave=0)
    assert (done.reused_tokens, done.computed_tokens, engine.evaluated) == (length, 0, 0)
    engine.check_rows()
    with pytest.raises(EngineError):
        engine.sample()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_an_earlier_prompt_are_never_sampled_from(
    open_store: Opener, length: int
) -> None:
    # A23: an unrelated prompt leaves logits behind; a resume without an evaluation has none.
    ids = some_ids(length + 1)
    turn(open_store(), StampedEngine(), ids[:length], "chat")
    engine = StampedEngine()
    engine.evaluate(some_ids(37, seed=5))
    Session(open_store(), engine, "chat").resume(ids)
    with pytest.raises(EngineError):
        engine.sample()


@pytest.mark.parametrize("shorter", [1, 15, 16, 17, 20, 47])
def test_a_shorter_prompt_leaves_nothing_of_the_longer_one(
    open_store: Opener, shorter: int
) -> None:
    # A22: 48 tokens are stored, and held in a variant; the prompt is a front of them.
    ids = some_ids(48)
    longer = StampedEngine()
    turn(open_store(), longer, ids, "chat")
    cold = StampedEngine()
    cold.evaluate(ids[:shorter])
    for engine in (StampedEngine(), longer):
        before = len(engine.positions)
        turn(open_store(), engine, ids[:shorter], "chat", save=False)
        assert engine.token_ids().tolist() == ids[:shorter].tolist()
        assert engine.positions[before:] == [shorter - 1]
        assert engine.sample() == cold.sample()


@pytest.mark.parametrize("generated", [1, 11, 12, 13, 28])
def test_a_sampled_token_that_was_never_evaluated_is_not_saved(
    open_store: Opener, generated: int
) -> None:
    # A26: generation stops with n + 1 tokens in the list and rows of n.
    engine, tokens = StampedEngine(), some_ids(20).tolist()
    session = Session(open_store(), engine, "chat")
    session.resume(tokens)
    engine.evaluate(some_ids(20))
    for left in reversed(range(generated)):
        tokens.append(engine.sample())
        if left:
            engine.evaluate(token_array(tokens[-1:]))
    saved = session.save()
    assert saved.tokens == len(tokens) - 1
    again = StampedEngine()
    turn(open_store(), again, [*tokens, 7], "chat")
    assert again.positions == [len(tokens) - 1, len(tokens)]
    again.check_rows()


def test_with_without_and_after_a_save_the_text_is_the_same(open_store: Opener) -> None:
    # A27: three ways to the same prompt; the save happens in the middle of generation.
    texts = []
    for way in ("no kvsnap", "save", "resume"):
        engine, ids = StampedEngine(vocabulary=2**20), some_ids(45)
        session = Session(open_store(), engine, "chat") if way != "no kvsnap" else None
        reused = session.resume(ids).reused_tokens if session else 0
        assert (reused > 0) == (way == "resume")
        engine.evaluate(ids[reused:])
        text = []
        for number in range(20):
            text.append(engine.sample())
            if number == 9 and session:
                held = engine.held
                session.save()
                assert engine.held == held
                assert engine.sample() == text[-1]
            engine.evaluate(token_array(text[-1:]))
        texts.append(text)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("length", [65, 100, 4097])
def test_a_prompt_that_does_not_fit_is_refused_before_anything_happens(
    store: Store, length: int
) -> None:
    # A60: a context smaller than the snapshot.
    turn(store, StampedEngine(capacity=5000), some_ids(length), "chat")
    small = StampedEngine(capacity=64)
    small.evaluate(some_ids(20, seed=4))
    with pytest.raises(DoesNotFit):
        Session(store, small, "chat").resume(some_ids(length))
    assert small.token_ids().tolist() == some_ids(20, seed=4).tolist()
    small.check_rows()


def test_a_session_of_no_tokens_can_be_saved_and_resumed(open_store: Opener) -> None:
    # A35
    saved = Session(open_store(), StampedEngine(), "empty").save()
    assert (saved.tokens, saved.blocks, saved.blocks_written) == (0, 0, 0)
    session = Session(open_store(), StampedEngine(), "empty")
    assert session.stored_token_ids().tolist() == []
    done = session.resume([])
    assert (done.prompt_tokens, done.reused_tokens, done.computed_tokens) == (0, 0, 0)


def test_a_session_that_is_not_there_leaves_the_engine_alone(store: Store) -> None:
    # A35: resuming a missing name must not wipe what is held.
    engine = StampedEngine()
    engine.evaluate(some_ids(20))
    with pytest.raises(NotFound):
        Session(store, engine, "missing").stored_token_ids()
    assert engine.held == 20
    engine.check_rows()


def test_ids_decide_and_equal_text_does_not(store: Store) -> None:
    # A62: "AB" may be [1, 2] or [3]; rows of one are not rows of the other.
    front = some_ids(40).tolist()
    turn(store, StampedEngine(), [*front, 1, 2], "chat")
    engine = StampedEngine()
    done = turn(store, engine, [*front, 3], "chat", save=False).resumed
    assert engine.positions == [40]
    session = Session(store, StampedEngine(), "chat")
    assert session.stored_token_ids().tolist() == [*front, 1, 2]
    assert done.reused_tokens == 40
    longer = session.resume([*front, 3, 9, 9])
    assert longer.reused_tokens == 40
    assert longer.stopped_by == ("differing token: position 40 is token 3 here, 1 in the session")
