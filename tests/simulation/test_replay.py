"""What is counted, and that real traffic gives the figures that were computed without kvsnap."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kvsnap.kvstore.simulation.replay import Case, replay
from kvsnap.kvstore.simulation.request import Request
from kvsnap.kvstore.simulation.trace import read_trace


@pytest.mark.parametrize(
    ("hits", "tokens", "reused"),
    [
        (0, 9, 0),
        (1, 9, 4),
        (2, 9, 8),  # the tail is computed
        (2, 8, 7),  # all blocks hit: the last token is computed all the same
        (2, 6, 5),  # the last block is partly filled
        (1, 1, 0),
        (0, 0, 0),
    ],
)
def test_at_least_the_last_token_is_always_computed(hits: int, tokens: int, reused: int) -> None:
    assert Request((), tokens).reused(hits, 4) == reused


def test_rates_are_of_all_blocks_and_all_tokens(workload_of: Any) -> None:
    row = replay(workload_of(["ab", "abc", "x"]), Case(None, "leaf-lru"))
    assert (row.blocks_asked, row.distinct_blocks, row.block_hits) == (6, 4, 2)
    assert row.block_hit_rate == pytest.approx(2 / 6)
    assert (row.prompt_tokens, row.reused_tokens) == (24, 8)
    assert row.token_reuse == pytest.approx(8 / 24)
    assert row.load_imbalance == 1


def test_a_block_behind_a_missing_one_is_no_hit(workload_of: Any) -> None:
    row = replay(workload_of(["ab", "b"]), Case(None, "leaf-lru"))
    assert (row.distinct_blocks, row.block_hits) == (3, 0)


def test_prompts_without_a_filled_block_are_counted_and_store_nothing(workload_of: Any) -> None:
    row = replay(workload_of(["", ""]), Case(1, "opt"))
    assert (row.requests, row.block_hit_rate, row.token_reuse, row.stored_blocks) == (2, 0, 0, 0)


def test_of_a_prompt_larger_than_the_capacity_the_front_is_kept(workload_of: Any) -> None:
    workload = workload_of(["abcd", "abcd"])
    for policy in ("leaf-lru", "lru", "fifo", "opt"):
        assert replay(workload, Case(2, policy)).block_hits == 2


def test_shared_blocks_are_counted_apart(workload_of: Any) -> None:
    workload = workload_of(["ab", "ac"])
    requests = tuple(dataclasses.replace(request, shared=1) for request in workload.requests)
    row = replay(dataclasses.replace(workload, requests=requests), Case(None, "leaf-lru"))
    assert (row.block_hit_rate, row.shared_hit_rate) == (0.25, 0.5)
    assert replay(workload, Case(None, "leaf-lru")).shared_hit_rate is None


@pytest.fixture(scope="module")
def conversation(mooncake: Path) -> Any:
    return read_trace(mooncake)


@pytest.mark.parametrize(
    ("policy", "capacity", "rate"),
    [
        ("leaf-lru", 1_000, 0.0445),
        ("leaf-lru", 5_000, 0.1118),
        ("leaf-lru", 10_000, 0.2116),
        ("leaf-lru", 20_000, 0.2878),
        ("leaf-lru", 50_000, 0.3546),
        ("leaf-lru", 100_000, 0.3637),
        ("leaf-lru", None, 0.3664),
        ("opt", 1_000, 0.1907),
        ("opt", 2_000, 0.2550),
        ("opt", 5_000, 0.3412),
        ("opt", 10_000, 0.3664),
        ("opt", 20_000, 0.3664),
        ("opt", None, 0.3664),
    ],
)
def test_the_conversation_trace_gives_the_rates_of_an_independent_computation(
    conversation: Any, policy: str, capacity: int | None, rate: float
) -> None:
    row = replay(conversation, Case(capacity, policy))
    assert (row.blocks_asked, row.distinct_blocks) == (288_500, 182_790)
    assert round(row.block_hit_rate, 4) == rate


def test_the_conversation_trace_has_the_tokens_that_its_lines_say(
    conversation: Any, mooncake: Path
) -> None:
    lines = mooncake.read_text().splitlines()
    assert conversation.prompt_tokens == sum(json.loads(line)["input_length"] for line in lines)
