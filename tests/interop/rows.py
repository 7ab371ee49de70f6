"""Rows of a prompt as transformers computes them, for the writers that serving engines are to load.

    python tests/interop/rows.py MODEL IDS.json DTYPE OUT.npz

In a process of its own where the engine's has patched torch: with the shim of tests/sglang it gives NaN.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from kvsnap.formats.interchange.foreign import HALVES, ForeignRows

NAMES = {"float32": ("f32", torch.int32, "<u4"), "bfloat16": ("bf16", torch.int16, "<u2")}


def rows_of(model: Path, ids: list[int], dtype: str) -> ForeignRows:
    """All rows of these tokens, in the model's own order of elements."""
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "SGLANG" not in k}
    with tempfile.TemporaryDirectory() as name:
        given, out = Path(name) / "ids.json", Path(name) / "rows.npz"
        given.write_text(json.dumps(ids))
        command = [sys.executable, __file__, str(model), str(given), dtype, str(out)]
        subprocess.run(command, check=True, env=clean)
        with np.load(out) as found:
            k, v, shape = tuple(found["k"]), tuple(found["v"]), found["shape"].tolist()
    return ForeignRows(
        k=k,
        v=v,
        k_type=NAMES[dtype][0],
        v_type=NAMES[dtype][0],
        order=HALVES,
        heads=shape[0],
        head_dim=shape[1],
        token_ids=np.array(ids, np.uint32),
    )


def compute(model: str, ids: list[int], dtype: str, out: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    with torch.no_grad():
        cache = loaded(torch.tensor([ids]), use_cache=True).past_key_values
    _, wide, unsigned = NAMES[dtype]

    def plane(tensor: torch.Tensor) -> np.ndarray:
        assert tensor.isfinite().all()
        rows = tensor[0].transpose(0, 1).reshape(len(ids), -1).contiguous()
        return rows.view(wide).numpy().view(unsigned)

    layers = cache.layers
    np.savez(
        out,
        k=np.stack([plane(layer.keys) for layer in layers]),
        v=np.stack([plane(layer.values) for layer in layers]),
        shape=[layers[0].keys.shape[1], layers[0].keys.shape[3]],
    )


def largest_difference(one: ForeignRows, other: ForeignRows, layer: int) -> float:
    """Of the values of a layer's rows, over the tokens that both have."""
    count = min(one.tokens, other.tokens)
    found = 0.0
    for a, b in ((one.k, other.k), (one.v, other.v)):
        values = [_f32(plane[layer][:count], one.k_type) for plane in (a, b)]
        assert all(np.isfinite(one).all() for one in values)
        found = max(found, float(np.abs(values[0] - values[1]).max()))
    return found


def _f32(rows: np.ndarray, name: str) -> np.ndarray:
    if name == "f32":
        return np.ascontiguousarray(rows).view("<f4")
    return (rows.astype("<u4") << 16).view("<f4")


if __name__ == "__main__":
    compute(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), sys.argv[3], sys.argv[4])
