"""Whether vLLM loads what kvsnap writes for its ExampleConnector, and goes on with the same text; and whether
kvsnap reads what vLLM writes.

    .venv-vllm/bin/python tests/interop/vllm_example_loads.py [--dtype float32]

In the environment of `make test-vllm`. Rows come from transformers, so the order of K's elements and the
layout of blocks are tried too; with zeros in their place the text must be another. In float32, as greedy
tokens of bf16 differ between engines at near ties. About a minute on two cores; the last line is the result.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # behind what is installed: the folders' names are no packages

from kvsnap.formats.interchange.foreign import HALVES, ForeignRows, Given
from kvsnap.formats.interchange.vllm_example import VLLM_EXAMPLE
from tests.interop.rows import largest_difference, rows_of
from tests.tiny_models import make

BLOCK = 32
TOKENS = 70
NEW = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(Path(name), told.dtype), indent=1))


def run(folder: Path, dtype: str) -> dict[str, Any]:
    model = make(folder / "model", "llama")
    chosen = random.Random(0)
    ids = [chosen.randrange(3, 2000) for _ in range(TOKENS)]
    rows = rows_of(model, ids, dtype)
    given = Given(block=BLOCK, token_ids=rows.token_ids)
    write(folder / "kvsnap", rows, given)
    zeros = ForeignRows(
        k=tuple(np.zeros_like(layer) for layer in rows.k),
        v=tuple(np.zeros_like(layer) for layer in rows.v),
        k_type=rows.k_type,
        v_type=rows.v_type,
        order=HALVES,
        heads=rows.heads,
        head_dim=rows.head_dim,
        token_ids=rows.token_ids,
    )
    write(folder / "zeros", zeros, given)
    native = serve(folder, model, ids, dtype, None)
    ours = serve(folder, model, ids, dtype, folder / "kvsnap")
    zeroed = serve(folder, model, ids, dtype, folder / "zeros")
    serve(folder, model, ids, dtype, folder / "vllm")
    files = {
        path.relative_to(folder / "vllm").as_posix(): memoryview(path.read_bytes())
        for path in (folder / "vllm").rglob("*.safetensors")
    }
    read = VLLM_EXAMPLE.read(files, given)
    assert VLLM_EXAMPLE.write is not None
    again = VLLM_EXAMPLE.write(read, given)
    result = {
        "dtype": dtype,
        "cached_tokens": ours["cached"][0],
        "same_tokens": same(ours, native),
        "same_tokens_of_zeros": same(zeroed, native),
        "read_from_vllm_tokens": read.tokens,
        "read_from_vllm_ids_proven": read.ids_proven,
        "largest_difference_layer_0": largest_difference(read, rows, 0),
        "written_again_to_the_byte": {name: bytes(data) for name, data in files.items()} == again,
    }
    result["passed"] = (
        result["cached_tokens"] == TOKENS // BLOCK * BLOCK == read.tokens
        and (result["same_tokens"] == NEW or dtype != "float32")
        and result["same_tokens_of_zeros"] < NEW
        and result["written_again_to_the_byte"]
        and read.ids_proven
        and result["largest_difference_layer_0"] < (1e-3 if dtype == "float32" else 0.2)
    )
    return result


def write(folder: Path, rows: ForeignRows, given: Given) -> None:
    assert VLLM_EXAMPLE.write is not None
    for name, content in VLLM_EXAMPLE.write(rows, given).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many of the first tokens are equal."""
    pairs = zip(one["tokens"][0], other["tokens"][0], strict=True)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), NEW)


def serve(
    folder: Path, model: Path, ids: list[int], dtype: str, storage: Path | None
) -> dict[str, Any]:
    """One prompt in a new engine process, with the connector on `storage` or without one."""
    job: dict[str, Any] = {
        "model": str(model),
        "args": {"dtype": dtype, "block_size": BLOCK},
        "steps": [{"prompts": [ids], "max_tokens": NEW}],
    }
    if storage is not None:
        job["connector"] = {"kv_connector": "ExampleConnector", "kv_connector_module_path": None}
        job["extra"] = {"shared_storage_path": str(storage)}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "vllm" / "serve.py", path],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the engine failed:\n{done.stderr[-3000:]}")
    step: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])["steps"][0]
    return step


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
