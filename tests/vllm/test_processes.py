"""The engine core in a process of its own; two engines on one store; one that is killed; a remote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.vllm.engines import PAGE, begin, end, ids, serve
from tests.vllm.files import block_files, quarantined

pytestmark = [pytest.mark.engine, pytest.mark.slow]
BLOCKS = 300 // PAGE
BLOCK_SIZE = 64
"""Tokens of a store's blocks, where nothing else is said."""
ALONE: dict[str, Any] = {"prompts": [ids(300)]}


@pytest.fixture
def job(models: dict[str, Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(models["llama"]),
        "store": str(tmp_path / "store"),
        "extra": {"block_size": PAGE},
        "steps": [ALONE],
    }


def test_all_is_stored_when_the_engine_core_has_its_own_process(
    job: dict[str, Any], tmp_path: Path
) -> None:
    one = {**ALONE, "max_tokens": 1}
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    (first,) = serve(tmp_path, job | {"steps": [one]}, **apart)
    assert len(block_files(tmp_path / "store")) == BLOCKS
    (second,) = serve(tmp_path, job | {"steps": [one]}, **apart)
    assert second.steps[0].restored == BLOCKS * PAGE
    assert second.steps[0].same(first.steps[0])


def test_two_engines_at_once_on_one_store(job: dict[str, Any], tmp_path: Path) -> None:
    steps = [{"prompts": [ids(300, seed)], "max_tokens": 20} for seed in (0, 1, 0)]
    both = [begin(tmp_path, job | {"steps": steps}) for _ in range(2)]
    (one,), (other,) = map(end, both)
    for mine, its in zip(one.steps, other.steps, strict=True):
        assert mine.tokens == its.tokens
    assert one.steps[2].tokens == one.steps[0].tokens
    assert not quarantined(tmp_path / "store")


def test_an_engine_that_was_killed_while_it_stored(job: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    long = {"prompts": [ids(900, seed) for seed in range(4)], "max_tokens": 60}
    killed = begin(tmp_path, job | {"steps": [{**long, "stored": 10**6}]})
    while not list(store.rglob("*.safetensors")):
        assert killed.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    (later,) = serve(tmp_path, job | {"steps": [{**long, "stored": 4 * (959 // PAGE)}, long]})
    first, second = later.steps
    assert first.tokens == second.tokens
    assert second.restored >= 4 * 864
    assert not quarantined(store)


def test_what_one_engine_stored_another_one_gets_through_a_remote(
    job: dict[str, Any], tmp_path: Path
) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    (tmp_path / "remote").mkdir()
    extra = {"remote": remote}  # and blocks of the usual size
    writes = job | {"extra": {**extra, "write_behind": True}}
    reads = job | {"extra": extra, "store": str(tmp_path / "empty")}
    wrote, read = serve(tmp_path, [writes, reads])
    assert read.steps[0].restored == 300 // BLOCK_SIZE * BLOCK_SIZE
    assert read.steps[0].same(wrote.steps[0])
