"""Resume in a new process: logits and 64 greedy tokens equal, bit for bit, an uninterrupted engine.

The reference evaluates the same tokens in the same batches (docs/design/0005): "equal to a cold
run" would compare llama.cpp's rounding with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from kvsnap.testing.turns import resume_cases

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK = 64
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]
SETTINGS: dict[str, dict[str, Any]] = {
    "f16": {},
    "f16-flash": {"flash_attn": True},
    "q8_0": {
        "flash_attn": True,
        "type_k": llama_cpp.GGML_TYPE_Q8_0,
        "type_v": llama_cpp.GGML_TYPE_Q8_0,
    },
    "f32": {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32},
}


def text(seed: int, length: int) -> list[int]:
    """Random ids of ordinary words: every session has its own first token on."""
    return [int(n) for n in np.random.default_rng(seed).integers(1000, 20000, length)]


@pytest.mark.parametrize("kind", SETTINGS)
def test_logits_and_greedy_tokens_equal_an_uninterrupted_engine(
    kind: str,
    model: Path,
    tmp_path: Path,
    start: Callable[[str, dict[str, Any]], Callable[[], Any]],
) -> None:
    saved = {f"of {length}": text(length, length) for length in LENGTHS}
    cases = [
        case for name, ids in saved.items() for case in resume_cases(name, ids, text(99, 40), BLOCK)
    ]
    job = {
        "model": str(model),
        "store": str(tmp_path / "store"),
        "settings": {"n_ctx": 512, "n_batch": 128, **SETTINGS[kind]},
        "saved": saved,
        "cases": cases,
        "greedy": 64,
    }
    start("save", job)()
    resumed_process, reference_process = start("resume", job), start("reference", job)
    resumed, reference = resumed_process(), reference_process()
    for case, warm, uninterrupted in zip(cases, resumed, reference, strict=True):
        label = f"{case['saved']}, prompt of {len(case['prompt'])}: {warm['why']}"
        assert warm["reused"] == case["reused"], label
        assert warm["reused"] + warm["computed"] == len(case["prompt"]), label
        assert warm["logits"] == uninterrupted["logits"], label
        assert warm["tokens"] == uninterrupted["tokens"], label
        assert len(warm["tokens"]) == 64, label
