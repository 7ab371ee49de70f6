"""Which replica serves a request, and what that does to what is found."""

from __future__ import annotations

from typing import Any

import pytest

from kvsnap.kvstore.simulation.chat import ChatTraffic
from kvsnap.kvstore.simulation.policies import POLICIES
from kvsnap.kvstore.simulation.replay import Case, replay
from kvsnap.kvstore.simulation.routing import IN_FLIGHT, LOAD_LIMIT, ROUTINGS, Load


@pytest.fixture
def shared(workload_of: Any) -> tuple[Any, list[Any]]:
    """A request of three blocks, and replicas that hold one, two and two of them."""
    workload = workload_of(["abc", "a", "ab", "ab"])
    replicas = [POLICIES["leaf-lru"](None, workload) for _ in range(3)]
    for number, replica in enumerate(replicas):
        replica.use(workload.requests[number + 1].chain, 0)
    return workload.requests[0], replicas


@pytest.mark.parametrize(
    ("load", "chosen"),
    [
        ([10, 20, 19], 2),  # longest prefix, then least load
        ([10, 19, 20], 1),
        ([10, 20, 90], 1),  # the other one has too much
        ([10, 90, 95], 0),  # both have
    ],
)
def test_prefix_routing_takes_the_longest_prefix_that_is_not_overloaded(
    shared: Any, load: list[int], chosen: int
) -> None:
    request, replicas = shared
    assert ROUTINGS["prefix"](0, request, replicas, load) == chosen


def test_least_loaded_takes_the_fewest_tokens_in_flight(shared: Any) -> None:
    request, replicas = shared
    assert ROUTINGS["least-loaded"](0, request, replicas, [10, 20, 9]) == 2


def test_round_robin_takes_one_after_the_other(shared: Any) -> None:
    request, replicas = shared
    chosen = [ROUTINGS["round-robin"](now, request, replicas, [0, 9, 0]) for now in range(4)]
    assert chosen == [0, 1, 2, 0]


def test_a_request_is_load_until_enough_others_have_come() -> None:
    load = Load(2)
    load.add(0, 7)
    for _ in range(2 * IN_FLIGHT - 1):
        load.add(1, 1)
    assert load.tokens == [7, 2 * IN_FLIGHT - 1]
    load.add(1, 1)
    assert load.tokens == [0, 2 * IN_FLIGHT]


@pytest.mark.parametrize("capacity", [94, None])
def test_prefix_routing_finds_more_than_round_robin(capacity: int | None) -> None:
    workload = ChatTraffic(requests=1000).workload()
    rate = {
        routing: replay(workload, Case(capacity, "leaf-lru", 4, routing)).block_hit_rate
        for routing in ROUTINGS
    }
    assert rate["prefix"] > rate["round-robin"] + 0.1
    one = replay(workload, Case(capacity and 4 * capacity, "leaf-lru"))
    assert rate["prefix"] < one.block_hit_rate


def test_one_prefix_for_all_does_not_take_everything_to_one_replica() -> None:
    workload = ChatTraffic(requests=1000, system_prompts=1, turns=1).workload()
    row = replay(workload, Case(None, "leaf-lru", 4, "prefix"))
    assert 1 <= row.load_imbalance < LOAD_LIMIT


def test_replicas_keep_their_own_blocks(workload_of: Any) -> None:
    row = replay(workload_of(["ab"] * 6), Case(None, "leaf-lru", 3, "round-robin"))
    assert (row.block_hits, row.stored_blocks) == (6, 6)
