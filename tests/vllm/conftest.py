"""Tiny models for vLLM, made once; and one engine's store that many tests look at."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is not None:
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with warnings.catch_warnings():  # what it and torch say while they are imported is not ours
        warnings.simplefilter("ignore")
        import vllm.engine.arg_utils
        import vllm.v1.core.sched.async_scheduler  # noqa: F401


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`llama`, `other` (the same with other weights) and `gemma3`."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from tests.tiny_models import make

    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make(folder / "llama", "llama"),
        "other": make(folder / "other", "llama", seed=1),
        "gemma3": make(folder / "gemma3", "gemma3"),
    }


@pytest.fixture(scope="session")
def tiny_llama(models: dict[str, Path]) -> Path:
    return models["llama"]
