"""Golden samples of other tools' files, and the values of their rows, computed without kvsnap's help."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.formats.interchange.foreign import ForeignRows

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
EXPECTED: dict[str, dict[str, Any]] = json.loads((SAMPLES / "expected.json").read_text("utf-8"))[
    "files"
]


def one_file(name: str) -> dict[str, memoryview]:
    return {name: memoryview((SAMPLES / name).read_bytes())}


def as_f32(rows: np.ndarray, kv_type: str) -> np.ndarray:
    if kv_type == "f32":
        return np.ascontiguousarray(rows).view("<f4")
    if kv_type == "f16":
        return np.ascontiguousarray(rows).view("<f2").astype("<f4")
    if kv_type == "bf16":
        return (rows.astype("<u4") << 16).view("<f4")
    assert kv_type == "q8_0"
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, 34)
    scale = blocks[:, :, :2].copy().view("<f2").astype("<f4")
    return (scale * blocks[:, :, 2:].view(np.int8).astype("<f4")).reshape(len(rows), -1)


def stored_digest(rows: ForeignRows) -> str:
    """sha256 of the values as they are stored: [layer][K, V][row][head][dim], float32."""
    digest = hashlib.sha256()
    for k, v in zip(rows.k, rows.v, strict=True):
        digest.update(np.ascontiguousarray(as_f32(k, rows.k_type)))
        digest.update(np.ascontiguousarray(as_f32(v, rows.v_type)))
    return digest.hexdigest()


def same_rows(a: ForeignRows, b: ForeignRows) -> bool:
    pairs = zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)
