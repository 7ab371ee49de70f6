"""Reuse is token-granular: inside a block, from the best of many siblings, from a session's tail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.engine_suite import LENGTHS
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


@pytest.mark.parametrize("element", ["F16", "rows"])
@pytest.mark.parametrize("branch", [0, 1, 5, 15, 16, 17, 20, 31, 32, 40, 47])
def test_a_branch_in_the_middle_of_a_block_reuses_up_to_the_token(
    open_store: Opener, branch: int, element: str
) -> None:
    ids = some_ids(48)
    turn(open_store(), StampedEngine(element=element), ids)
    other = [*ids[:branch], *(ids[branch : branch + 1] ^ 1), *some_ids(30, seed=2)]
    engine = StampedEngine(element=element)
    turn(open_store(), engine, other)
    assert engine.positions == list(range(branch, len(other)))
    engine.check_rows()


@pytest.mark.parametrize("length", [n for n in LENGTHS if n])
def test_a_prompt_that_ends_inside_a_stored_block_reuses_all_but_its_last_token(
    open_store: Opener, length: int
) -> None:
    turn(open_store(), StampedEngine(), some_ids(64))
    engine = StampedEngine()
    turn(open_store(), engine, some_ids(64)[:length], save=False)
    assert engine.positions == [length - 1]
    engine.check_rows()


def test_the_best_of_many_siblings_is_used(open_store: Opener) -> None:
    system, random = some_ids(32), np.random.Generator(np.random.PCG64(3))
    children = [[*system, *random.integers(0, 3, 16).tolist()] for _ in range(60)]
    for child in children:
        turn(open_store(), StampedEngine(), child)
    for _ in range(40):
        asked = [*system, *random.integers(0, 3, 16).tolist()]
        best = max(_common(asked, child) for child in children)
        engine = StampedEngine()
        turn(open_store(), engine, asked, save=False)
        assert engine.positions == list(range(min(best, 47), 48))
        engine.check_rows()


def _common(one: list[int], other: list[int]) -> int:
    different = (n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(different, len(one))


@pytest.mark.parametrize("high", [255, 256, 65535, 2**24 - 1, 2**32 - 1])
def test_siblings_are_ordered_by_number_and_not_by_byte(open_store: Opener, high: int) -> None:
    # Little-endian bytes would put 256 before 1: the neighbour would be another block.
    front = [7] * 8
    for token in (0, 1, 2, high, high - 1):
        turn(open_store(), StampedEngine(), [*front, token, *[5] * 7])
    for token in (1, high):
        engine = StampedEngine()
        turn(open_store(), engine, [*front, token, *[5] * 5, 6, 6], save=False)
        assert engine.positions == [14, 15]
        engine.check_rows()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_session_of_its_own_reuses_its_tail_to_the_token(open_store: Opener, length: int) -> None:
    ids = [*some_ids(length), *some_ids(9, seed=2)]
    turn(open_store(), StampedEngine(), ids, "chat")
    asked = [*ids[:length], ids[length] ^ 1, *some_ids(20, seed=3)]
    engine = StampedEngine()
    turn(open_store(), engine, asked, "chat")
    assert engine.positions == list(range(length, len(asked)))
    engine.check_rows()


def test_a_tail_serves_only_its_own_session(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), some_ids(40), "one")
    engine = StampedEngine()
    turn(open_store(), engine, some_ids(41), "two")
    assert engine.positions == list(range(32, 41))
    engine.check_rows()


def test_another_sessions_block_beats_a_tail_that_ends_earlier(open_store: Opener) -> None:
    ids = some_ids(49)
    turn(open_store(), StampedEngine(), ids[:36], "short")
    turn(open_store(), StampedEngine(), ids[:48], "long")
    engine = StampedEngine()
    turn(open_store(), engine, ids, "short")
    assert engine.positions == [48]
    engine.check_rows()


def test_a_session_saved_in_this_process_reuses_its_new_tail(store: Store) -> None:
    """The engine was used for something else in between, so nothing is left in it."""
    engine = StampedEngine()
    session = Session(store, engine, "chat")
    ids = some_ids(60)
    engine.evaluate(ids[:40])
    session.save()
    engine.truncate(0)
    engine.evaluate(some_ids(10, seed=5))
    assert session.resume(ids).reused_tokens == 40
    engine.check_rows()


def test_two_requests_that_share_a_compacted_history_do_not_mix(open_store: Opener) -> None:
    # A70: session 1 is compacted to system + a summary whose first token equals session 2's.
    system = some_ids(32).tolist()
    second = [*system, *some_ids(40, seed=2)]
    turn(open_store(), StampedEngine(), [*system, *some_ids(40, seed=1)], "1")
    turn(open_store(), StampedEngine(), second, "2")
    compacted = [*system, second[32], *some_ids(19, seed=3)]
    engine = StampedEngine()
    turn(open_store(), engine, compacted, "1")
    assert engine.positions == list(range(33, 52))
    engine.check_rows()


@pytest.mark.parametrize("unit", [2, 32, 2**30])
def test_ids_that_add_up_to_the_same_are_not_the_same(open_store: Opener, unit: int) -> None:
    # A13, A14: rolling hashes miss +n here and -n there, or two neighbours that change places.
    ids = (some_ids(49).astype(np.int64) + 2**31 - 1).tolist()
    turn(open_store(), StampedEngine(), ids)
    for place in range(0, 47, 5):
        for other in (
            [*ids[:place], ids[place] + unit - 1, ids[place + 1] - unit + 1, *ids[place + 2 :]],
            [*ids[:place], ids[place + 1], ids[place], *ids[place + 2 :]],
        ):
            if other == ids:
                continue
            engine = StampedEngine()
            turn(open_store(), engine, other, save=False)
            assert engine.positions == list(range(place, 49))
            engine.check_rows()
