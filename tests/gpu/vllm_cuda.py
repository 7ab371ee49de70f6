"""The vLLM connector on a GPU: page copies on a stream of their own. For a machine with CUDA.

    pip install 'vllm==0.32.0' && pip install -e '.[vllm]'
    python tests/gpu/vllm_cuda.py [--model FOLDER] [--tp N]

It was prepared on a machine without a GPU and has not been run on one. Without --model it makes a tiny
random one. One process computes and stores, another restores: vLLM's own count of external tokens must be
all whole blocks, and greedy tokens equal; then one bit of a stored block is flipped, and a third process
computes from there. At last 16 requests at once, of which 8 share a prefix that is loaded while the others
run, twice with the same result. Exit status 0 and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SERVE = HERE.parent / "vllm" / "serve.py"
sys.path.insert(0, str(HERE.parent))
BLOCK = 64


def serve(folder: Path, model: str, args: dict[str, Any], steps: list[Any]) -> list[Any]:
    """What each step did, in a new process."""
    job = {"model": model, "store": str(folder / "store"), "args": args, "steps": steps}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, str(SERVE), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    found: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])["steps"]
    return found


def external(step: dict[str, Any]) -> int:
    """Tokens that vLLM counts as found outside of its own cache."""
    return int(step["counted"]["vllm:external_prefix_cache_hits"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--tp", type=int, default=1)
    told = parser.parse_args()
    chosen = random.Random(0)
    prompt = [chosen.randrange(5, 1900) for _ in range(20 * BLOCK + 9)]
    args = {"block_size": 16, "max_model_len": 2048, "tensor_parallel_size": told.tp}
    args |= {"enforce_eager": False, "gpu_memory_utilization": 0.5}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if told.model is None:
            from tiny_models import make

            told.model = str(make(folder / "model", "llama"))
        step = {"prompts": [prompt], "max_tokens": 16}
        (cold,) = serve(folder, told.model, args, [step])
        (again,) = serve(folder, told.model, args, [step])
        assert external(cold) == 0, external(cold)
        assert external(again) == 20 * BLOCK, external(again)
        assert again["tokens"] == cold["tokens"], "other tokens after a restore"
        for path in (folder / "store" / "blocks").rglob("*.safetensors"):
            if f'"start":"{5 * BLOCK}"'.encode() in path.read_bytes():
                data = bytearray(path.read_bytes())
                data[-100] ^= 1
                path.write_bytes(data)
        (mended,) = serve(folder, told.model, args, [step])
        assert mended["tokens"] == cold["tokens"], "other tokens after damage"
        assert mended["counted"]["vllm:kvsnap_load_failures"] >= 1
        shared = [[*prompt[: 20 * BLOCK], number + 7] for number in range(8)]
        others = [[number + 9, *prompt] for number in range(8)]
        busy = {"prompts": [p for pair in zip(shared, others, strict=True) for p in pair]}
        first, second = (serve(folder, told.model, args, [busy])[0] for _ in range(2))
        assert first["tokens"] == second["tokens"], "other tokens under load"
        print(json.dumps({"restored": external(again), "tp": told.tp, "busy": external(second)}))


if __name__ == "__main__":
    main()
