"""The connector under vLLM's own scheduler, in everything that requests may do to each other.

Requests that share prefixes come, are aborted, preempted by a small pool of pages, chunked; stored blocks
are damaged on one rank only. Whatever is in the store is then the KV of the tokens that it is named after,
whatever is loaded, too, and every answer is the one that an engine without a store gives.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvsnap.engines.vllm_planner import Planner
from kvsnap.engines.vllm_worker import Worker
from tests.vllm.lockstep import PAGE, Lockstep, make_config
from tests.vllm.stored import Stored
from tests.vllm.walk import SALTS, Walk

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"in_flight": 2},
    "blocks of two pages": {"size": 2 * PAGE},
    "async, blocks of two pages, three ranks": {"in_flight": 2, "size": 2 * PAGE, "ranks": 3},
    "no room": {"pages": 17, "budget": 8},
    "async without room": {"pages": 17, "in_flight": 2, "budget": 32},
    "by priority": {"pages": 17, "policy": "priority"},
    "async by priority": {"pages": 17, "policy": "priority", "in_flight": 2, "ranks": 1},
    "in one process": {"ranks": 1, "in_process": True},
    "async in one process": {"ranks": 1, "in_process": True, "in_flight": 2},
}


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> Any:
    return make_config(tiny_llama)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_stored_loaded_and_answered_is_right(
    config: Any, tmp_path: Path, kind: str, seed: int
) -> None:
    walk = Walk(config, tmp_path / "store", seed, **KINDS[kind])
    walk.go(300)
    failures = sum(worker.take_counts().get("load_failures", 0) for worker in walk.engine.workers)
    assert walk.engine.loaded > 50
    assert len(walk.stored) > 50
    assert failures > 0 or kind == "no room"


def settles_what_vllm_has(planner: Planner, request: Any, pages: Any, external: int) -> None:
    admit(planner, request, pages, external)
    one = planner._tracked[request.request_id]
    one.settled = max(one.settled, (one.local + external) // planner.size)
    planner._ripe[request.request_id] = one


def settles_what_is_scheduled(planner: Planner, scheduled: Any, pages_of: Any) -> Any:
    for name, tokens in scheduled.items():
        one = planner._tracked[name]
        one.settled = (one.request.num_computed_tokens + tokens) // planner.size
        planner._ripe[name] = one
    return plan(planner, scheduled, pages_of)


def hides_what_failed(worker: Worker) -> set[int]:
    worker.failed.clear()
    return set()


admit, plan = Planner.admit, Planner.plan
NAIVE = [
    (Planner, "admit", settles_what_vllm_has),
    (Planner, "plan", settles_what_is_scheduled),
    (Worker, "take_failed", hides_what_failed),
]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("owner", "name", "naive"), NAIVE, ids=[n[2].__name__ for n in NAIVE])
def test_a_naive_connector_is_found_out(
    config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    naive: Any,
    in_flight: int,
) -> None:
    """Otherwise the test above tells nothing."""
    monkeypatch.setattr(owner, name, naive)
    walks = (Walk(config, tmp_path / f"{seed}", seed, in_flight=in_flight) for seed in range(10))
    with pytest.raises(AssertionError, match=r"rows of something else|answered wrong|loaded wrong"):
        deque(walk.go(300) for walk in walks)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_block_that_one_rank_could_not_load_is_computed_and_stored_again(
    config: Any, tmp_path: Path, in_flight: int
) -> None:
    engine = Lockstep(config, tmp_path, in_flight=in_flight)
    stored = Stored(tmp_path, engine.right, SALTS)
    prompt = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0, 2, 1, 1]
    engine.add(prompt, 1)
    engine.finish()
    stored.check()
    blocks = stored.files()
    assert len(blocks) == 4 * 2
    engine.forget_prefixes()
    second = next(path for path in blocks if stored.is_block(path, start=PAGE, rank=1))
    stored.damage(second)
    again = engine.add(prompt, 5)
    engine.finish()
    assert list(engine.all[again].output_token_ids) == engine.right.continued(None, prompt, 5)
    assert set(blocks) <= set(stored.files())
    stored.check()
    assert not stored.damaged
    assert [worker.take_counts()["loaded"] for worker in engine.workers] == [4, 1]
    engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_lacks_is_not_offered(config: Any, tmp_path: Path, rank: int) -> None:
    engine = Lockstep(config, tmp_path)
    stored = Stored(tmp_path, engine.right, SALTS)
    prompt = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0, 2, 1, 1]
    engine.add(prompt, 1)
    engine.finish()
    engine.forget_prefixes()
    third = next(p for p in stored.files() if stored.is_block(p, start=2 * PAGE, rank=rank))
    stored.check()
    stored.damage(third)
    engine.workers[rank].store.blocks.set_aside(bytes.fromhex(third.stem), "it is damaged")
    assert not third.exists()
    again = engine.add(prompt, 3)
    engine.finish()
    assert len(engine.loads[again].token_ids) == 2 * PAGE
    assert [worker.take_counts()["loaded"] for worker in engine.workers] == [2, 2]
    assert third.exists(), "it was not stored again"
    stored.check()
    engine.close()


def test_requests_of_one_step_that_share_what_is_loaded_are_right(
    config: Any, tmp_path: Path
) -> None:
    engine = Lockstep(config, tmp_path, pages=64, budget=128)
    prompt = [0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0, 2, 1, 1]
    engine.add(prompt, 1)
    engine.finish()
    engine.forget_prefixes()
    stored = Stored(tmp_path, engine.right, SALTS)
    stored.check()
    stored.damage(
        next(path for path in stored.files() if stored.is_block(path, start=PAGE, rank=0))
    )
    names = [engine.add([*prompt, number], 6) for number in range(3)]
    engine.finish()
    for name, number in zip(names, range(3), strict=True):
        right = engine.right.continued(None, [*prompt, number], 6)
        assert list(engine.all[name].output_token_ids) == right
    stored.check()
    engine.close()
