"""Policies against naive models and against every possible choice, on many small trees."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.kvstore.simulation.policies import POLICIES
from kvsnap.kvstore.simulation.replay import Case, replay
from kvsnap.kvstore.simulation.request import Workload

# Few different blocks, so that most prompts share a front and part somewhere.
prompts = st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=6, max_size=24)
few_prompts = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=7)


def _hits(chain: tuple[int, ...], stored: Any) -> int:
    hits = 0
    while hits < len(chain) and chain[hits] in stored:
        hits += 1
    return hits


def _stored(replica: Any, workload: Workload) -> set[int]:
    return {block for block in range(len(workload.parents)) if block in replica}


def _naive_leaf_lru(workload: Workload, capacity: int) -> list[set[int]]:
    """Touches every block of every chain and looks at every block for every eviction."""
    used: dict[int, int] = {}
    seen = []
    for now, request in enumerate(workload.requests):
        for block in request.chain:
            if block not in used:
                while len(used) >= capacity:
                    parents = {workload.parents[b] for b in used}
                    leaves = [b for b in used if b not in parents and b not in request.chain]
                    if not leaves:
                        break
                    del used[min(leaves, key=used.__getitem__)]
                if len(used) >= capacity:
                    break
            used[block] = now
        seen.append(set(used))
    return seen


def _most_hits(workload: Workload, capacity: int) -> int:
    """The best of all choices: after each request any stored or requested blocks may be kept."""
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for request in workload.requests:
        after: dict[frozenset[int], int] = {}
        for stored, hits in best.items():
            hits += _hits(request.chain, stored)
            there = stored | set(request.chain)
            for kept in map(frozenset, combinations(there, min(capacity, len(there)))):
                after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


@settings(max_examples=300)
@given(prompts=prompts, capacity=st.integers(1, 8))
def test_leaf_lru_keeps_what_touching_every_block_would_keep(
    workload_of: Any, prompts: list[list[int]], capacity: int
) -> None:
    workload = workload_of(prompts)
    replica = POLICIES["leaf-lru"](capacity, workload)
    for now, expected in enumerate(_naive_leaf_lru(workload, capacity)):
        replica.use(workload.requests[now].chain, now)
        assert _stored(replica, workload) == expected


@given(prompts=few_prompts, capacity=st.integers(1, 4))
def test_no_choice_of_blocks_has_more_hits_than_opt(
    workload_of: Any, prompts: list[list[int]], capacity: int
) -> None:
    workload = workload_of(prompts)
    assert replay(workload, Case(capacity, "opt")).block_hits == _most_hits(workload, capacity)


@pytest.mark.parametrize("policy", ["leaf-lru", "opt"])
@given(prompts=prompts, capacity=st.integers(1, 8))
def test_the_kept_blocks_are_closed_under_parent(
    workload_of: Any, policy: str, prompts: list[list[int]], capacity: int
) -> None:
    workload = workload_of(prompts)
    replica = POLICIES[policy](capacity, workload)
    for now, request in enumerate(workload.requests):
        replica.use(request.chain, now)
        stored = _stored(replica, workload)
        assert {workload.parents[block] for block in stored} <= stored | {None}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(prompts=prompts, capacity=st.integers(1, 8))
def test_capacity_holds_evictions_are_counted_and_nobody_beats_opt(
    workload_of: Any, policy: str, prompts: list[list[int]], capacity: int
) -> None:
    workload = workload_of(prompts)
    replica = POLICIES[policy](capacity, workload)
    gone = 0
    before: set[int] = set()
    for now, request in enumerate(workload.requests):
        replica.use(request.chain, now)
        after = _stored(replica, workload)
        assert len(after) == len(replica) <= capacity
        assert after - before <= set(request.chain)
        if policy != "opt":  # which may refuse
            assert after >= set(request.chain[:capacity])
        gone += len(before - after)
        before = after
    assert replica.evictions == gone
    optimum = replay(workload, Case(capacity, "opt"))
    assert replay(workload, Case(capacity, policy)).block_hits <= optimum.block_hits


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(prompts=prompts)
def test_with_room_for_all_every_repeated_block_hits_and_nothing_goes(
    workload_of: Any, policy: str, prompts: list[list[int]]
) -> None:
    workload = workload_of(prompts)
    for capacity in (None, len(workload.parents) + 1):
        row = replay(workload, Case(capacity, policy))
        assert row.block_hits == row.blocks_asked - row.distinct_blocks
        assert (row.evictions, row.stranded_blocks, row.stored_blocks) == (
            0,
            0,
            row.distinct_blocks,
        )


def test_plain_lru_lets_the_front_of_an_old_chain_go_and_strands_the_rest(workload_of: Any) -> None:
    workload = workload_of(["abc", "x", "abc"])
    strands = replay(workload_of(["abc", "x"]), Case(3, "lru"))
    assert (strands.stored_blocks, strands.stranded_blocks) == (3, 2)
    again = replay(workload, Case(3, "lru"))
    assert (again.block_hits, again.stranded_asked) == (0, 2)
    assert replay(workload, Case(3, "leaf-lru")).block_hits == 2


def test_a_hit_makes_a_block_recent(workload_of: Any) -> None:
    workload = workload_of(["a", "b", "a", "c", "a"])
    assert replay(workload, Case(2, "leaf-lru")).block_hits == 2


def test_fifo_lets_the_oldest_block_go_though_it_was_just_used(workload_of: Any) -> None:
    workload = workload_of(["a", "b", "a", "c", "a"])
    assert replay(workload, Case(2, "fifo")).block_hits == 1
    assert replay(workload, Case(2, "lru")).block_hits == 2


def test_opt_refuses_blocks_that_nobody_asks_for_again(workload_of: Any) -> None:
    row = replay(workload_of(["ab", "xyz", "ab", "uvw", "ab"]), Case(2, "opt"))
    assert (row.block_hits, row.evictions) == (4, 0)
