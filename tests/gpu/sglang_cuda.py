"""SGLang's own kernels, streams and page-locked host pages with KVSnapStorage: for a machine with CUDA.

    pip install 'sglang[all]==0.5.23' && pip install -e '.[sglang,remote]'
    python tests/gpu/sglang_cuda.py [--model FOLDER] [--layout L ...] [--tp N]

This is what the tests with the shim cannot tell (tests/sglang/shim). It was prepared on a machine
without a GPU and has not been run on one. Without --model it makes a tiny random one.

For each host layout with the copies that SGLang has for it: one process computes and stores, another
restores; SGLang's own count of tokens from storage must be all whole pages, and the greedy tokens
equal. Then one bit of a stored page is flipped: a third process restores the pages before it, computes
the rest, and the tokens are equal again. Exit status 0, and one line of JSON for each layout.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKER = HERE.parent / "sglang" / "engine_worker.py"
PAGE = 64
PROMPT = [(7 * n * n + n) % 1900 + 5 for n in range(20 * PAGE + 9)]
COPIES = {"layer_first": "kernel", "page_first": "kernel", "page_first_direct": "direct"}
"""Host layout to `--hicache-io-backend`."""
ON_CUDA: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": None,
    "sampling_backend": None,
    "disable_cuda_graph": False,
    "disable_overlap_schedule": False,
    "max_total_tokens": 32768,
    "page_size": PAGE,
    "mem_fraction_static": 0.5,
}


def process(model: str, engine: dict[str, Any], store: Path, steps: list[Any]) -> dict[str, Any]:
    """What the labelled steps of one process gave."""
    job = {"model": model, "engine": engine, "storage": {"store": str(store)}, "steps": steps}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        done = subprocess.run(
            [sys.executable, str(WORKER), file.name], stdout=subprocess.PIPE, text=True, check=True
        )
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return values


def check(model: str, layout: str, tp: int, folder: Path) -> dict[str, Any]:
    engine = ON_CUDA | {
        "hicache_mem_layout": layout,
        "hicache_io_backend": COPIES[layout],
        "tp_size": tp,
    }
    store, ask = folder / layout, ["asked", "generate", [PROMPT]]
    (computed,) = process(model, engine, store, [ask])["asked"]
    assert computed["cached"] == 0, computed
    second = process(model, engine, store, [ask, ["damaged", "damage", 4, -100]])
    (restored,) = second["asked"]
    assert restored["details"]["storage"] == len(PROMPT) // PAGE * PAGE, restored
    assert restored["ids"] == computed["ids"], (restored, computed)
    assert len(second["damaged"]) == tp, "one file a rank"
    (shortened,) = process(model, engine, store, [ask])["asked"]
    assert shortened["details"]["storage"] == 4 * PAGE, shortened
    assert shortened["ids"] == computed["ids"], (shortened, computed)
    return {
        "layout": layout,
        "io_backend": COPIES[layout],
        "tp": tp,
        "restored_tokens": restored["details"]["storage"],
        "cold_seconds": computed["seconds"],
        "restored_seconds": restored["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--layout", nargs="*", choices=sorted(COPIES), default=sorted(COPIES))
    parser.add_argument("--tp", type=int, default=1)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvsnap-sglang-") as name:
        folder = Path(name)
        model = told.model or str(folder / "model")
        if told.model is None:
            maker = HERE.parent / "tiny_models.py"
            subprocess.run([sys.executable, str(maker), model, "llama"], check=True)
        for layout in told.layout:
            print(json.dumps(check(model, layout, told.tp, folder)), flush=True)


if __name__ == "__main__":
    main()
