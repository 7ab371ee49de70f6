"""A client compacts its history; another one's conversation begins with the same system prompt (case A70).
Only blocks that are really the prompt's are reused: rows are compared with what their tokens must give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.tenants import ALICE, BOB, open_shared

SYSTEM = some_ids(32).tolist()
FIRST, SECOND = ([*SYSTEM, *some_ids(72, seed=seed)] for seed in (1, 2))
"""Histories of six blocks and a tail, of two users."""
SUMMARY = [SECOND[32], *some_ids(19, seed=3)]
"""Its first token is that of the other user's first question."""


@pytest.fixture(params=["sealed", "plain"])
def store(request: Any, tmp_path: Path) -> Iterator[Store]:
    with open_shared(tmp_path / "store", encrypt=request.param == "sealed") as opened:
        for ids, name in ((FIRST, "1"), (SECOND, "2")):
            turn(opened, StampedEngine(), ids, name, tenant=ALICE)
        yield opened


def reused(store: Store, ids: list[int], engine: StampedEngine, name: str = "1") -> int:
    """Tokens that were not computed, after every row was looked at."""
    engine.positions.clear()
    turn(store, engine, ids, name, tenant=ALICE)
    found = len(ids) - len(engine.positions)
    assert engine.positions == list(range(found, len(ids)))
    engine.check_rows()
    return found


def test_the_summary_meets_the_other_users_first_token_only(store: Store) -> None:
    # In the clear a block that begins alike gives its front: here the one token. Sealed, whole ones.
    wanted = 32 if store.encrypt else 33
    assert reused(store, [*SYSTEM, *SUMMARY], StampedEngine()) == wanted


def test_whole_blocks_that_follow_are_reused_where_they_are_really_equal(store: Store) -> None:
    compacted = [*SYSTEM, *SECOND[32:64], *some_ids(20, seed=4)]
    assert reused(store, compacted, StampedEngine()) == 64


@pytest.mark.parametrize("at", [36, 48, 52])
def test_equal_tokens_after_another_prefix_are_not(store: Store, at: int) -> None:
    """The last question, whole blocks of it, is kept behind the summary: the same tokens, other KV."""
    compacted = [*SYSTEM, *some_ids(at - 32, seed=5), *FIRST[48:]]
    assert reused(store, compacted, StampedEngine()) <= 32


def test_an_engine_that_served_the_other_user_meanwhile(store: Store) -> None:
    engine = StampedEngine()
    assert reused(store, [*SECOND, 1], engine, "2") == len(SECOND)
    assert reused(store, [*SYSTEM, *SUMMARY], engine) == 33  # what the engine holds, token by token
    assert reused(store, [*SECOND, 1, 2], engine, "2") == len(SECOND) + 1


@pytest.mark.parametrize("store", ["sealed"], indirect=True)
def test_users_of_two_keys_share_not_even_the_system_prompt(store: Store) -> None:
    engine = StampedEngine()
    turn(store, engine, [*SYSTEM, *SUMMARY], "1", tenant=BOB)
    assert engine.positions == list(range(52))
    engine.positions.clear()
    turn(store, engine, [*SYSTEM, *SUMMARY, 1], "1", tenant=BOB)
    assert engine.positions == [52]
    engine.check_rows()
