"""Real engines, one process after the other on one store: what is restored, and what is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.engines import PAGE, Engine, ids, serve
from tests.vllm.files import block_files, quarantined

pytestmark = [pytest.mark.engine, pytest.mark.slow]
PROMPT, MORE = ids(300), 40
BLOCKS = 300 // PAGE
IN_ALL = (300 + MORE - 1) // PAGE
"""Blocks of the prompt and of what was generated; the last token's KV is never computed."""
SHARED = [PROMPT[:256] + ids(40, seed) for seed in range(1, 9)]


@dataclass
class Runs:
    """`none`: an engine without the connector; `first` filled the store, `second` came later."""

    store: Path
    none: Engine
    first: Engine
    second: Engine
    quarantined: int


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    store = folder / "store"
    alone = {"prompts": [PROMPT], "max_tokens": MORE}
    base = {"model": str(models["llama"])}
    (none,) = serve(folder, base | {"steps": [alone, {"prompts": SHARED}, alone]})
    base |= {"store": str(store), "extra": {"block_size": PAGE}}
    whole = {**alone, "stored": IN_ALL}
    salted = {**alone, "salt": "a"}
    (first,) = serve(
        folder,
        base
        | {
            "steps": [
                whole,
                alone,
                {**salted, "stored": 2 * IN_ALL},
                salted,
                {**alone, "salt": "b", "stored": 3 * IN_ALL},
            ]
        },
    )
    turn = PROMPT + first.steps[0].tokens[0] + ids(9, 77)
    steps = [alone, {"prompts": [turn]}, {"prompts": SHARED}]
    (second,) = serve(folder, base | {"steps": steps})
    return Runs(store, none, first, second, len(quarantined(store)))


def test_a_new_process_restores_the_prompt_and_answers_the_same(runs: Runs) -> None:
    cold, warm = runs.first.steps[0], runs.second.steps[0]
    assert cold.restored == 0
    assert warm.restored == BLOCKS * PAGE
    assert warm.same(cold)
    assert warm.counted("kvsnap_loaded_blocks") == BLOCKS
    assert warm.counted("kvsnap_loaded_tokens") == BLOCKS * PAGE
    assert warm.counted("kvsnap_load_failures") == 0


def test_with_the_connector_the_answer_is_the_one_without(runs: Runs) -> None:
    assert runs.first.steps[0].same(runs.none.steps[0])


def test_generated_tokens_are_found_in_the_next_turn(runs: Runs) -> None:
    assert runs.second.steps[1].restored == IN_ALL * PAGE


def test_another_salt_finds_nothing_and_the_same_one_all(runs: Runs) -> None:
    _, again, salted, salted_again, other = runs.first.steps
    assert again.restored == BLOCKS * PAGE
    assert salted.restored == 0
    assert salted_again.restored == BLOCKS * PAGE
    assert other.restored == 0
    assert salted_again.same(runs.first.steps[0])


def test_eight_requests_at_once_that_share_a_prefix(runs: Runs) -> None:
    together = runs.second.steps[2]
    assert together.tokens == runs.none.steps[1].tokens
    assert together.restored >= 256
    assert together.counted("kvsnap_loaded_blocks") == 256 // PAGE  # once, for all of them


def test_no_block_was_set_aside(runs: Runs) -> None:
    assert runs.quarantined == 0


def test_the_connector_brings_no_compiler_into_the_engine(runs: Runs) -> None:
    assert set(runs.first.modules) <= set(runs.none.modules)


@pytest.fixture(scope="module")
def others(
    runs: Runs, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Engine]:
    """Engines that must find nothing in the store of `runs`, each in one way another one."""
    folder = tmp_path_factory.mktemp("others")
    key = folder / "tenant.key"
    key.write_text("5a" * 32)
    base: dict[str, Any] = {
        "model": str(models["llama"]),
        "store": str(runs.store),
        "extra": {"block_size": PAGE},
        "steps": [{"prompts": [PROMPT], "max_tokens": 2}],
    }
    jobs = {
        "weights": base | {"model": str(models["other"])},
        "dtype": base | {"args": {"dtype": "float32"}},
        "cache dtype": base | {"args": {"kv_cache_dtype": "fp8"}},
        "page size": base | {"args": {"block_size": 64}, "extra": {"block_size": 64}},
        "tenant": base | {"extra": {"block_size": PAGE, "tenant_key_file": str(key)}},
        "the same": base,
    }
    return dict(zip(jobs, serve(folder, list(jobs.values())), strict=True))


@pytest.mark.parametrize("what", ["weights", "dtype", "cache dtype", "page size", "tenant"])
def test_another_engine_finds_nothing(others: dict[str, Engine], what: str) -> None:
    assert others[what].steps[0].restored == 0


def test_the_same_engine_finds_all(others: dict[str, Engine]) -> None:
    assert others["the same"].steps[0].restored == BLOCKS * PAGE


DAMAGED = [("flip", 6), ("cut", 4), ("remove", 2), ("change", 0)]
"""How, and which block. What failed is not offered for a while, so the deepest comes first."""


@dataclass
class Damaged:
    """`engine` met damage, `later` came afterwards."""

    store: Path
    engine: Engine
    later: Engine


@pytest.fixture(scope="module")
def damaged(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    folder = tmp_path_factory.mktemp("damaged")
    store, alone = folder / "store", {"prompts": [PROMPT], "stored": BLOCKS}
    base = {"model": str(models["llama"]), "store": str(store), "extra": {"block_size": PAGE}}
    steps = [alone, *({**alone, "damage": damage} for damage in DAMAGED)]
    engine, later = serve(folder, [base | {"steps": steps}, base | {"steps": [alone]}])
    return Damaged(store, engine, later)


@pytest.mark.parametrize("number", range(len(DAMAGED)), ids=[how for how, _ in DAMAGED])
def test_a_damaged_block_is_computed_instead(damaged: Damaged, number: int) -> None:
    cold, broken = damaged.engine.steps[0], damaged.engine.steps[number + 1]
    assert broken.counted("kvsnap_load_failures") == 1
    assert broken.counted("kvsnap_loaded_blocks") == DAMAGED[number][1]
    assert broken.tokens == cold.tokens
    assert broken.logprobs == [pytest.approx(cold.logprobs[0], abs=0.05)]


def test_what_was_damaged_is_set_aside_and_stored_again(damaged: Damaged) -> None:
    later = damaged.later.steps[0]
    assert len(quarantined(damaged.store)) == 3  # of the one that was removed nothing is left
    assert len(block_files(damaged.store)) == BLOCKS
    assert later.restored == BLOCKS * PAGE
    assert later.counted("kvsnap_load_failures") == 0
    assert later.tokens == damaged.engine.steps[0].tokens
