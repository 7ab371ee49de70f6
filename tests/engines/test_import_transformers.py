"""Files that users and serving engines make of a transformers model, imported with `--engine transformers`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.cli import in_process

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
MAKER = Path(__file__).parents[1] / "tiny_models.py"
TOKENS = 150
FORMATS = {
    "transformers": [],
    "safetensors": [],
    "mlx-lm": [],
    "vllm-example": ["--block-tokens", "16"],
    "sglang": ["--block-tokens", "16", "--model-name", "tiny"],
    "lmcache": ["--block-tokens", "16", "--chunk-tokens", "64", "--model-name", "tiny"],
}


@pytest.fixture(scope="module", params=["f32", "bf16"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / str(request.param)
    command = [sys.executable, str(MAKER), str(out), "llama", "--dtype", str(request.param)]
    subprocess.run(command, check=True, capture_output=True)
    return out


def run(store: Path, *arguments: object) -> Any:
    done = in_process.run("--store", store, "--json", *arguments)
    assert done.complaint() == ""
    return done.json if done.code == 0 else done.err


def test_every_format_comes_back_verified_and_an_altered_model_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([(7 * n * n + 3 * n) % 1900 + 50 for n in range(TOKENS)]))
    model = ["--engine", "transformers", "--model", folder]
    saved = run(tmp_path / "a", "save", *model, "--token-ids", ids, "--session", "s")
    assert saved["tokens"] == TOKENS, saved
    for name, options in FORMATS.items():
        out = tmp_path / name
        done = run(tmp_path / "a", "export", "s", "--to", name, *options, out)
        assert not isinstance(done, str), (name, done)
        given = options[: options.index("--model-name")] if "--model-name" in options else options
        back = run(
            tmp_path / f"{name}-store",
            *("import", out, *model, "--token-ids", ids, "--session", "t", *given),
        )
        assert not isinstance(back, str), (name, back)
        assert back["format"] == name
        assert back["verified"]
        whole = {"vllm-example": 144, "sglang": 144, "lmcache": 128}.get(name, TOKENS)
        assert back["tokens"] == whole
        resumed = run(
            tmp_path / f"{name}-store", "resume", *model, "--token-ids", ids, "--max-tokens", 1
        )
        assert resumed["reused_tokens"] == 128, (name, resumed)

    other = tmp_path / "other-weights"
    command = [sys.executable, str(MAKER), str(other), "llama", "--dtype", folder.name]
    subprocess.run([*command, "--seed", "2"], check=True, capture_output=True)
    refused = run(
        tmp_path / "b",
        *("import", tmp_path / "transformers", "--engine", "transformers", "--model", other),
        *("--token-ids", ids, "--session", "t"),
    )
    assert "not what this model computes" in refused
