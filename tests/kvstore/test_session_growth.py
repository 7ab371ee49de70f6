"""A long conversation: what is computed and written grows with what is said, not with its square."""

from __future__ import annotations

from typing import Any

import pytest

from kvsnap.kvstore.answer import Answer, generate, prefill
from kvsnap.kvstore.conversation import Source, answered, new_prompt, next_prompt
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped_text import StampedTextEngine

pytestmark = pytest.mark.slow

TURNS = 200
SMOLLM2 = {"layers": 30, "kv_heads": 3, "head_dim": 64}
"""Rows of 23,040 bytes a token, those of the bundled model; few models have less."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StampedTextEngine:
    engine = StampedTextEngine(batch=512, capacity=8192, longest=8, **SMOLLM2)
    # Its own sample reads all rows for every token: 50 GB for this conversation.
    monkeypatch.setattr(engine, "sample", lambda: len(engine.positions) * 31)
    return engine


@pytest.fixture
def written(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every file that the store writes, blocks and session files alike."""
    sizes, write = list[int](), store.space.write

    def noted(packed: Any, *args: Any) -> Any:
        sizes.append(packed.size)
        return write(packed, *args)

    monkeypatch.setattr(store.space, "write", noted)
    return sizes


def test_200_turns_write_and_compute_what_is_new(
    store: Store, engine: StampedTextEngine, written: list[int]
) -> None:
    session = Session(store, engine, "chat", codec="raw")
    bytes_of_turn, raw, tokens = list[int](), 0, 0
    for number in range(TURNS):
        source = Source(messages=[{"role": "user", "content": f"tell me more about {number}"}])
        if session.stored is None:
            prompt = new_prompt(engine, source, answer=True)
        else:
            prompt = next_prompt(engine, session.stored.record, source)
        result = Answer()
        assert prefill(session, engine, prompt.token_ids, result).reused_tokens == tokens
        for _ in generate(engine, prompt.token_ids, result, max_tokens=8):
            pass
        saved = session.save(answered(prompt, engine, result.new_ids, result.ended).notes("m"))
        bytes_of_turn.append(sum(written))
        written.clear()
        raw, tokens = raw + saved.bytes_raw, saved.tokens
    assert len(engine.positions) == tokens  # every token was computed once
    filled = tokens // store.block_size * store.block_size
    assert raw == filled * engine.layout.token_bytes()  # and every block written once
    linear = TURNS / 20 * sum(bytes_of_turn[:20])
    assert sum(bytes_of_turn) < 1.2 * linear
    assert sum(bytes_of_turn[-20:]) < 1.2 * sum(bytes_of_turn[:20])
