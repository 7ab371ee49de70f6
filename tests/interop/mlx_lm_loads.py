"""Whether mlx-lm itself loads prompt caches that kvsnap wrote, and what it finds in them.

    kvsnap export SESSION --to mlx-lm cache.safetensors
    python -m venv /tmp/mlx && /tmp/mlx/bin/pip install 'mlx[cpu]' mlx-lm==0.32.2
    /tmp/mlx/bin/python tests/interop/mlx_lm_loads.py cache.safetensors
    /tmp/mlx/bin/python tests/interop/mlx_lm_loads.py cache.safetensors --model DIR --ids ids.json

Runs in an environment of its own, without kvsnap: 0.32.2 for `--to mlx-lm`, 0.31.3 or older for
`--to mlx-lm-0.31`. Prints one line of JSON a file. `rows_f32_sha256` is that of tests/golden/foreign: over
little-endian float32 [layer][K, V][row][head][element]. Fails where a token more does not fit behind.

With a model and the ids of a prompt, of which the cache holds all but the last: whether the model writes
the same after it as after its own prefill, and something else with K zeroed. Seen to be equal over 12
tokens for a cache of transformers (float32, `tests/tiny_models.py OUT llama --dtype f32`) in both layouts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache

NEW = 12


def held(layer: Any) -> tuple[Any, Any]:
    """K and V of a layer's tokens, without padding."""
    return layer.keys[..., : layer.offset, :], layer.values[..., : layer.offset, :]


def by_row(plane: Any) -> np.ndarray:
    """float32 [row, head, element] of the first sequence."""
    return np.array(plane.astype(mx.float32))[0].swapaxes(0, 1)


def check_one_more(layer: Any) -> None:
    """The engine's next step: a row is put behind the others, which stay as they are."""
    before = [by_row(plane) for plane in held(layer)]
    marks = [
        mx.full((*plane.shape[:2], 1, plane.shape[3]), 3, plane.dtype) for plane in held(layer)
    ]
    layer.update_and_fetch(*marks)
    for old, plane in zip(before, held(layer), strict=True):
        rows = by_row(plane)
        if len(rows) != len(old) + 1 or (rows[:-1] != old).any() or (rows[-1] != 3).any():
            raise SystemExit("a token more does not stand behind the others")


def describe(path: str) -> dict[str, Any]:
    layers, metadata = load_prompt_cache(path, return_metadata=True)
    planes = [by_row(plane) for layer in layers for plane in held(layer)]
    found = {
        "file": path,
        "mlx_lm": version("mlx-lm"),
        "classes": sorted({type(layer).__name__ for layer in layers}),
        "layers": len(layers),
        "tokens": sorted({layer.offset for layer in layers}),
        "stored": [list(layers[0].keys.shape), str(layers[0].keys.dtype)],
        "metadata": metadata,
        "rows_f32_sha256": hashlib.sha256(b"".join(p.tobytes() for p in planes)).hexdigest(),
    }
    for layer in layers:
        check_one_more(layer)
    return found


def greedy(model: Any, cache: Any, last: int) -> list[int]:
    ids = [last]
    for _ in range(NEW):
        ids.append(int(mx.argmax(model(mx.array([ids[-1:]]), cache=cache)[0, -1])))
    return ids[1:]


def check_goes_on(path: str, model: Any, ids: list[int]) -> dict[str, list[int]]:
    own = make_prompt_cache(model)
    model(mx.array([ids[:-1]]), cache=own)
    zeroed = load_prompt_cache(path)
    for layer in zeroed:
        layer.keys = mx.zeros_like(layer.keys)
    found = {
        "own": greedy(model, own, ids[-1]),
        "loaded": greedy(model, load_prompt_cache(path), ids[-1]),
        "zeroed": greedy(model, zeroed, ids[-1]),
    }
    if found["own"] != found["loaded"] or found["own"] == found["zeroed"]:
        raise SystemExit(f"the model writes something else: {found}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--model")
    parser.add_argument("--ids", type=Path)
    told = parser.parse_args()
    model = load(told.model)[0] if told.model else None
    for path in told.files:
        found = describe(path)
        if model is not None:
            found |= check_goes_on(path, model, json.loads(told.ids.read_text("utf-8")))
        print(json.dumps(found))


if __name__ == "__main__":
    main()
