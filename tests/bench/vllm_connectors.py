"""kvsnap beside vLLM's own example connector, and beside none, on the same prompts in one run.

    python tests/bench/vllm_connectors.py [--rounds 3] [--prompts 6] [--tokens 960] [--lmcache HOST:PORT DIR]

In the venv of `make test-vllm`. Each engine is a process; rounds alternate, medians over all prompts are
shown, as ratios to the engine without a connector. "cold": nothing is stored, what is shown is what storing
costs. "hooks": the share of that time that vLLM's main thread spent in the connector, measured inside. For
LMCache (MP mode) its server must run already, with an L2 folder DIR; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SERVE = HERE.parent / "vllm" / "serve.py"
sys.path.insert(0, str(HERE.parent))

from tiny_models import make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=960)
    parser.add_argument("--kind", default="smol")
    parser.add_argument("--block-size", type=int, default=32, help="of kvsnap; vLLM's is 32 here")
    parser.add_argument("--lmcache", nargs=2, metavar=("HOST:PORT", "DIR"))
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bench(told, Path(name))


def bench(told: Any, folder: Path) -> None:
    model = make(folder / "model", told.kind)
    chosen = random.Random(0)
    prompts = [[chosen.randrange(3, 2000) for _ in range(told.tokens)] for _ in range(told.prompts)]
    warm = [chosen.randrange(3, 2000) for _ in range(told.tokens)]
    kinds: dict[str, dict[str, Any]] = {
        "none": {},
        "kvsnap": {"store": str(folder / "kvsnap"), "extra": {"block_size": told.block_size}},
        "example": {
            "connector": {"kv_connector": "ExampleConnector", "kv_connector_module_path": None},
            "extra": {"shared_storage_path": str(folder / "example")},
        },
    }
    if told.lmcache:
        host, port = told.lmcache[0].split(":")
        kinds["lmcache"] = {
            "connector": {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            },
            "extra": {"lmcache.mp.host": host, "lmcache.mp.port": int(port)},
        }
    stored = {"kvsnap": folder / "kvsnap", "example": folder / "example"}
    if told.lmcache:
        stored["lmcache"] = Path(told.lmcache[1])
    seconds: dict[tuple[str, str], list[float]] = {}
    cached: dict[str, list[int]] = {}
    hooks: list[float] = []
    loads: list[float] = []
    sizes: dict[str, int] = {}
    for number in range(told.rounds):
        own = [[(token + number) % 1997 + 3 for token in prompt] for prompt in prompts]
        for run in ("cold", "restore"):
            for kind, job in kinds.items():
                if kind == "none" and run == "restore":
                    continue
                found = serve(folder, model, job, [warm, *own], told.tokens)
                steps = found["steps"][1:]
                seconds.setdefault((kind, run), []).extend(step["seconds"] for step in steps)
                if run == "restore":
                    cached.setdefault(kind, []).extend(step["cached"][0] for step in steps)
                if kind == "kvsnap" and run == "restore":
                    loads += [step["hooks"] for step in steps]
                if kind == "kvsnap" and run == "cold":
                    hooks += [step["hooks"] / step["seconds"] for step in steps]
        for kind, place in stored.items():
            size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            sizes[kind] = sizes.get(kind, 0) + size
            if kind != "lmcache":
                shutil.rmtree(place)
    base = statistics.median(seconds["none", "cold"])
    print(
        f"{told.prompts} prompts of {told.tokens} tokens, {told.rounds} rounds, model {told.kind};"
    )
    print(f"without a connector {base:.3f} s a prompt (one new token)")
    for kind in kinds:
        cold = statistics.median(seconds[kind, "cold"])
        line = f"{kind:8} cold {cold / base:6.3f}x"
        if kind != "none":
            again = statistics.median(seconds[kind, "restore"])
            tokens = statistics.mean(cached[kind])
            line += f"  restored {again / base:6.3f}x ({again:.3f} s, {tokens:.0f} tokens cached)"
            line += f"  {sizes[kind] / told.rounds / told.prompts / 1e6:.2f} MB a prompt"
        print(line)
    print(f"kvsnap's hooks when it restores: {statistics.median(loads):.3f} s (median)")
    print(f"hooks of kvsnap, cold: {100 * statistics.median(hooks):.2f} % of the time (median)")


def serve(
    folder: Path, model: Path, job: dict[str, Any], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """`prompts` one after the other, in a new process; the first is to warm up."""
    steps = [{"prompts": [prompt], "max_tokens": 1} for prompt in prompts]
    args = {"max_model_len": tokens + 64, "max_num_batched_tokens": max(2048, tokens)}
    path = folder / "job.json"
    path.write_text(
        json.dumps({"model": str(model), "args": args, "time_hooks": True, **job, "steps": steps})
    )
    environment = dict(os.environ)
    if "LMCache" in json.dumps(job):  # it imports numba, which breaks vLLM's own process on a CPU
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    found = subprocess.run(
        [sys.executable, str(SERVE), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if found.returncode:
        sys.exit(f"the engine failed:\n{found.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
