"""explain for a model that goes on from state checkpoints only: where it can, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvsnap.kvstore.explain.explain import (
    DAMAGED,
    END,
    EVICTED,
    Explanation,
    explain,
)
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(70)
"""Four blocks of 16 and a tail of 6."""
MORE = [*IDS, *some_ids(20, seed=3)]


def engine() -> StampedEngine:
    return StampedEngine(window=20, recurrent=12)


def explained(store: Store, ids: Sequence[int], *, check: bool = False) -> Explanation:
    return explain(Session(store, engine()), ids, check=check)


def state_of(store: Store, name: str) -> bytes:
    state = store.sessions.load("default", name).record.state
    assert state
    return state


def test_the_match_ends_in_the_checkpoint_that_a_resume_goes_on_from(store: Store) -> None:
    turn(store, engine(), IDS, "chat")
    found = explained(store, MORE, check=True)
    assert (found.matched_tokens, found.reused_tokens, found.tail_tokens) == (70, 70, 0)
    assert found.state == state_of(store, "chat").hex()
    assert [block.tokens for block in found.blocks] == [16] * 4
    assert (found.verdict, found.text) == (END, "nothing that follows is stored")
    assert turn(store, engine(), MORE, save=False).computed == 20


def test_blocks_that_no_checkpoint_stands_on_are_told(store: Store) -> None:
    turn(store, engine(), IDS, "chat")
    found = explained(store, IDS)  # the last token is always computed: the state is one too far
    assert (found.matched_tokens, found.state, found.verdict) == (0, None, END)
    assert found.text == "blocks go on to position 64; there is no state checkpoint to go on from"
    assert turn(store, engine(), IDS, save=False).computed == 70


def test_an_evicted_checkpoint_is_known_by_the_session_that_names_it(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, engine(), IDS, "chat")
        name = state_of(store, "chat")
        used = store.space.used()
    with Store(store_path, capacity=used - 1, min_free="0") as store:
        assert gc(store).evicted == 1
        assert store.index.find(name) is None
        found = explained(store, MORE)
        assert (found.matched_tokens, found.verdict, found.block) == (0, EVICTED, name.hex())
        assert "session 'chat' shares 70 tokens" in found.text
        parted = [*IDS[:66], 1, *MORE[70:]]
        assert explained(store, parted).verdict == END, "not a checkpoint of this prompt"


@pytest.mark.parametrize("met", [True, False], ids=["met before", "found by a check"])
def test_a_damaged_checkpoint_is_the_reason(store: Store, met: bool) -> None:
    turn(store, engine(), IDS[:40], "start")
    turn(store, engine(), IDS, "chat")
    name = state_of(store, "chat")
    flip(store.place.block(name), -1)
    if met:
        assert turn(store, engine(), MORE, save=False).resumed.reused_tokens == 40
    found = explained(store, MORE, check=not met)
    assert (found.matched_tokens, found.verdict, found.block) == (40, DAMAGED, name.hex())
    assert found.state == state_of(store, "start").hex()


def test_a_lost_checkpoint_of_another_prompt_is_not_the_reason(store: Store) -> None:
    turn(store, engine(), IDS[:40], "start")
    turn(store, engine(), IDS, "chat")
    parted = [*IDS[:66], 1, *MORE[70:]]
    store.place.block(state_of(store, "chat")).unlink()
    turn(store, engine(), MORE, save=False)
    found = explained(store, parted)
    assert (found.matched_tokens, found.verdict) == (40, END)
    assert explained(store, MORE).verdict == DAMAGED


def test_the_front_of_a_lost_sibling_block_is_not_missed(store: Store) -> None:
    # Such a model cannot begin inside a block, so the loss of one that parts there changes nothing.
    turn(store, engine(), IDS[:32], "start")
    turn(store, engine(), IDS[:48], "chat")
    (name,) = (
        n for (n,) in store.index.query("SELECT name FROM blocks WHERE start = 32 AND state = 0")
    )
    store.place.block(name).unlink()
    store.blocks.set_aside(name, "the file is missing")
    found = explained(store, [*IDS[:40], *some_ids(30, seed=8)])
    assert (found.matched_tokens, found.verdict) == (32, END)
