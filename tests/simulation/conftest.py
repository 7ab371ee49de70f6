"""Small workloads, written as what the blocks hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvsnap.kvstore.simulation.request import Chains, Request, Workload

BLOCK_SIZE = 4
MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake-conversation.jsonl"

Make = Callable[[Sequence[Sequence[object]]], Workload]


@pytest.fixture(scope="session")
def workload_of() -> Make:
    """`["ab", "ac"]`: two prompts of two blocks each that share the first one."""

    def make(prompts: Sequence[Sequence[object]]) -> Workload:
        chains = Chains()
        requests = [Request(chains.chain(p), BLOCK_SIZE * len(p)) for p in prompts]
        return chains.workload("test", BLOCK_SIZE, requests)

    return make


@pytest.fixture(scope="session")
def mooncake() -> Path:
    """12,031 real chat requests, where they lie beside the checkout."""
    if not MOONCAKE.is_file():
        pytest.skip("the conversation trace is not here")
    return MOONCAKE
