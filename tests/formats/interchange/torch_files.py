"""Files of torch.save for tests, made by torch, and the classes of transformers without transformers."""

from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kvsnap.formats.interchange.foreign import ForeignRows, Given
from kvsnap.formats.interchange.torch_cache import TORCH_CACHE
from kvsnap.formats.interchange.torch_zip import read_entries


def saved(value: Any) -> dict[str, memoryview]:
    file = io.BytesIO()
    torch.save(value, file)
    return {"x": memoryview(file.getvalue())}


def read(value: Any, **given: Any) -> ForeignRows:
    return TORCH_CACHE.read(saved(value), Given(**given))


def plane(batch: int = 1, tokens: int = 4, start: float = 0.0) -> torch.Tensor:
    values = torch.arange(batch * 2 * tokens * 3, dtype=torch.float32) + start
    return values.reshape(batch, 2, tokens, 3).bfloat16()


def pairs(layers: int = 2, **shape: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    return tuple(
        (plane(start=2.0 * n, **shape), plane(start=2.0 * n + 1, **shape)) for n in range(layers)
    )


def rows_like(layers: Any, row: int = 0) -> list[list[list[int]]]:
    """[K, V][layer][token][element], by torch."""
    return [
        [
            layer[which][row]
            .transpose(0, 1)
            .reshape(layer[which].shape[2], -1)
            .view(torch.uint16)
            .tolist()
            for layer in layers
        ]
        for which in (0, 1)
    ]


def lists_of(rows: ForeignRows) -> list[list[Any]]:
    return [[layer.tolist() for layer in planes] for planes in (rows.k, rows.v)]


class State:
    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def of_module(name: str) -> Any:
    """A class that is pickled as transformers' of this name."""
    return type(name, (State,), {"__module__": "transformers.cache_utils"})


Cache, Layer = of_module("DynamicCache"), of_module("DynamicLayer")
Window = of_module("DynamicSlidingWindowLayer")


def of_transformers(monkeypatch: pytest.MonkeyPatch, value: Any) -> dict[str, memoryview]:
    module = ModuleType("transformers.cache_utils")
    for kind in (Cache, Layer, Window):
        setattr(module, kind.__name__, kind)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        patch.setitem(sys.modules, "transformers.cache_utils", module)
        return saved(value)


def entries_of(value: Any) -> dict[str, bytes]:
    return {n: bytes(d) for n, d in read_entries(saved(value)["x"]).items()}
