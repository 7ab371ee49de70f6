"""Samples of serving engines' files, and what they must decode to, computed without kvsnap's help."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.formats.interchange.foreign import ForeignRows, Given

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
EXPECTED: dict[str, Any] = json.loads((SAMPLES / "expected.json").read_text("utf-8"))
IDS: list[int] = EXPECTED["prompt_token_ids"]


def files_of(folder: str) -> dict[str, memoryview]:
    root = SAMPLES / folder
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    assert paths
    return {path.relative_to(root).as_posix(): memoryview(path.read_bytes()) for path in paths}


def given(**more: Any) -> Given:
    facts = {
        "token_ids": IDS, "layers": 4, "heads": 2, "head_dim": 64, "dtype": "bf16", "block": 32,
        "chunk": 64, "model_name": "llama4L",
    }  # fmt: skip
    return Given(**{**facts, **more})


def digest(rows: ForeignRows, tokens: slice = slice(None), layers: slice = slice(None)) -> str:
    """As expected.json has it: float32 [layer][K, V][row][head][head_dim]."""
    pairs = list(zip(rows.k, rows.v, strict=True))[layers]
    values = [[_f32(plane[tokens], rows.k_type) for plane in pair] for pair in pairs]
    return hashlib.sha256(np.array(values, "<f4").tobytes()).hexdigest()


def _f32(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (rows.astype("<u4") << 16).view("<f4")
    return np.ascontiguousarray(rows).view({"f16": "<f2", "f32": "<f4"}[kind]).astype("<f4")


def made_rows(tokens: int, kind: str = "f16", layers: int = 3, heads: int = 2, dim: int = 8) -> Any:
    """Rows whose elements are all unlike one another, as far as their type goes."""
    wide = 4 if kind == "f32" else 2
    count = 2 * layers * tokens * heads * dim
    planes = np.arange(count, dtype=f"<u{wide}").reshape(2, layers, tokens, heads * dim)
    return ForeignRows(
        k=tuple(planes[0]), v=tuple(planes[1]), k_type=kind, v_type=kind, order="halves",
        heads=heads, head_dim=dim, token_ids=np.arange(5, 5 + tokens, dtype=np.uint32),
    )  # fmt: skip


def equal(a: ForeignRows, b: ForeignRows, tokens: int) -> bool:
    pairs = zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    return all(np.array_equal(one[:tokens], other[:tokens]) for one, other in pairs)


class Counted(Mapping[str, memoryview]):
    """Files that tell which of them were asked for."""

    def __init__(self, files: Mapping[str, memoryview]) -> None:
        self.files, self.read = files, list[str]()

    def __getitem__(self, name: str) -> memoryview:
        self.read.append(name)
        return self.files[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def views(files: dict[str, bytes]) -> dict[str, memoryview]:
    return {name: memoryview(content) for name, content in files.items()}
