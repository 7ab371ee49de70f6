"""Real engines with little room: pages, tokens of a step, and a store that is full. Answers stay the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.engines import PAGE, Engine, Step, ids, serve
from tests.vllm.files import block_files

pytestmark = [pytest.mark.engine, pytest.mark.slow]
CROWD = {"prompts": [ids(100, seed) for seed in range(1, 5)], "max_tokens": 90}
"""Four requests that grow to 6 pages each."""
FEW_PAGES = {"num_gpu_blocks_override": 15, "max_model_len": 256}
LONG = {"prompts": [ids(300)], "max_tokens": 40}
CHUNKS = {"max_num_batched_tokens": 64, "max_model_len": 512, "max_num_seqs": 8}
ABORTED = {"prompts": [ids(200, seed) for seed in range(3)], "max_tokens": 30, "abort_after": 5}
FULL = {"prompts": [ids(200, 5), ids(300, 6), ids(300, 7)], "max_tokens": 8}


@dataclass
class Both:
    """The same without and with the connector; `store` is the latter's."""

    without: Engine
    with_store: Engine
    store: Path

    def answers_are_equal(self, number: int) -> Step:
        step = self.with_store.steps[number]
        assert step.tokens == self.without.steps[number].tokens
        return step


@pytest.fixture(scope="module")
def all_of_them(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Both]:
    """One process: a new one for each takes its time."""
    folder = tmp_path_factory.mktemp("tight")
    base: dict[str, Any] = {"model": str(models["llama"])}
    extra = {"block_size": PAGE}
    few = base | {"args": FEW_PAGES, "steps": [CROWD, CROWD]}
    chunks = base | {"args": CHUNKS, "steps": [{**LONG, "stored": 10}, LONG]}
    aborted = base | {"steps": [ABORTED, {**ABORTED, "abort_after": 0}, LONG]}
    full = base | {"steps": [FULL, FULL]}
    jobs = {"few pages": few, "chunks": chunks, "aborted": aborted, "full": full}
    without, stored = [], []
    for name, job in jobs.items():
        steps = [{key: step[key] for key in step if key != "stored"} for step in job["steps"]]
        without.append(job | {"steps": steps})
        own = extra | ({"capacity": "250KB"} if name == "full" else {})
        stored.append(job | {"store": str(folder / name), "extra": own})
    found = serve(folder, [one | {"store": None} for one in without] + stored)
    half = len(jobs)
    return {
        name: Both(found[number], found[half + number], folder / name)
        for number, name in enumerate(jobs)
    }


def test_preempted_requests_are_answered_as_without(all_of_them: dict[str, Both]) -> None:
    both = all_of_them["few pages"]
    for number in range(2):
        step = both.answers_are_equal(number)
        assert step.counted("num_preemptions") > 0
    assert both.with_store.steps[1].restored > 0


def test_a_prompt_in_chunks_is_stored_whole_and_restored(all_of_them: dict[str, Both]) -> None:
    both = all_of_them["chunks"]
    both.answers_are_equal(0)
    assert both.answers_are_equal(1).restored == 288


def test_what_others_do_goes_on_when_one_is_aborted(all_of_them: dict[str, Both]) -> None:
    both = all_of_them["aborted"]
    both.answers_are_equal(0)
    both.answers_are_equal(1)  # aborted while its blocks are loaded
    assert both.answers_are_equal(2).restored > 0  # its prompt is the beginning of this one


def test_a_full_store_stops_nobody(all_of_them: dict[str, Both]) -> None:
    both = all_of_them["full"]
    both.answers_are_equal(0)
    both.answers_are_equal(1)
    assert sum(path.stat().st_size for path in block_files(both.store)) <= 250_000
