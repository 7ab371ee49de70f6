"""Whether SGLang loads what kvsnap writes for its HiCacheFile, and goes on with the same text; and whether
kvsnap reads what SGLang writes.

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang/shim .venv-sglang/bin/python \\
        tests/interop/sglang_file_loads.py [--layout layer_first]

In the environment of `make test-sglang`. SGLang writes its pages first, which tell the name that it gives
the model. Then it gets pages of the same prompt whose rows come from transformers, and pages of zeros: the
text must be the same, and another. The last line is the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # behind what is installed: the folders' names are no packages

from kvsnap.formats.interchange.foreign import ForeignRows, Given
from kvsnap.formats.interchange.sglang_file import SGLANG_FILE, page_name
from tests.interop.rows import largest_difference, rows_of
from tests.tiny_models import make

PAGE = 32
TOKENS = 70
COMPARED = 8
"""Of the new tokens: bf16 of two engines may part at a near tie after that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="layer_first")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(run(Path(name), told.layout), indent=1))


def run(folder: Path, layout: str) -> dict[str, Any]:
    from tests.sglang.engine_worker import Run

    model = make(folder / "model", "llama")
    chosen = random.Random(0)
    ids = [chosen.randrange(3, 2000) for _ in range(TOKENS)]
    rows = rows_of(model, ids, "bfloat16")
    engine = {"page_size": PAGE, "hicache_mem_layout": layout, "log_level": "error"}
    served = Run({"model": str(model), "engine": engine})
    native = _generate(served, ids, folder / "sglang")
    files = {path.name: memoryview(path.read_bytes()) for path in (folder / "sglang").glob("*.bin")}
    name = page_name(next(iter(files)))
    assert name is not None
    given = Given(
        layers=len(rows.k),
        heads=rows.heads,
        head_dim=rows.head_dim,
        dtype="bf16",
        block=PAGE,
        page_layout=layout,
        model_name=name.model,
        token_ids=np.array(ids, np.uint32),
    )
    read = SGLANG_FILE.read(files, given)
    assert SGLANG_FILE.write is not None
    again = SGLANG_FILE.write(read, given)
    zeros = dataclasses.replace(
        rows,
        k=tuple(np.zeros_like(layer) for layer in rows.k),
        v=tuple(np.zeros_like(layer) for layer in rows.v),
    )
    _write(folder / "kvsnap", rows, given)
    _write(folder / "zeros", zeros, given)
    ours = _generate(served, ids, folder / "kvsnap")
    zeroed = _generate(served, ids, folder / "zeros")
    served.engine.shutdown()
    result = {
        "layout": layout,
        "from_storage": ours["details"].get("storage"),
        "same_tokens": _same(ours, native),
        "same_tokens_of_zeros": _same(zeroed, native),
        "read_from_sglang_tokens": read.tokens,
        "largest_difference_layer_0": largest_difference(read, rows, 0),
        "written_again_to_the_byte": {n: bytes(files[n]) for n in again if n in files} == again,
    }
    result["passed"] = (
        result["from_storage"] == TOKENS // PAGE * PAGE == read.tokens
        and result["same_tokens"] >= COMPARED
        and result["same_tokens_of_zeros"] < COMPARED
        and result["written_again_to_the_byte"]
        and result["largest_difference_layer_0"] < 0.2
    )
    return result


def _write(folder: Path, rows: ForeignRows, given: Given) -> None:
    assert SGLANG_FILE.write is not None
    folder.mkdir()
    for name, content in SGLANG_FILE.write(rows, given).items():
        (folder / name).write_bytes(content)


def _generate(served: Any, ids: list[int], storage: Path) -> dict[str, Any]:
    """One request with HiCacheFile on this folder; afterwards the engine holds nothing of it."""
    storage.mkdir(exist_ok=True)
    extra = json.dumps({"file_storage_path": str(storage), "prefetch_threshold": PAGE})
    manager = served.engine.tokenizer_manager
    done = served.wait_for(manager.attach_hicache_storage("file", extra))
    assert done.success, done.message
    (found,) = served.generate([ids])
    time.sleep(3.0)  # its backup thread has written what it has
    served.flush()
    assert served.detach()[0]
    result: dict[str, Any] = found
    return result


def _same(one: dict[str, Any], other: dict[str, Any]) -> int:
    """How many of the first tokens are equal."""
    pairs = list(zip(one["ids"], other["ids"], strict=True))
    return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))


if __name__ == "__main__":
    main()
