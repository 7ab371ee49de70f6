"""Caches in files that kvsnap writes: loaded by torch and safetensors, the model goes on as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import DynamicCache

from kvsnap.engines.transformers_probe import run as forward
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange import get_format, recognise
from kvsnap.formats.interchange.foreign import ForeignRows, Given
from tests import tiny_models

pytestmark = pytest.mark.engine

PROMPT = [1, *range(700, 730)]
NEW = 6
Layers = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module", params=sorted(tiny_models.DTYPES))
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return tiny_models.llama().to(tiny_models.DTYPES[request.param]).eval()


def prefilled(model: Any) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        forward(model, torch.tensor([PROMPT[:-1]]), cache)
    return cache


def greedy(model: Any, cache: DynamicCache) -> list[int]:
    """What the model writes after the prompt, whose last token is not in the cache."""
    ids = PROMPT[-1:]
    with torch.inference_mode():
        for _ in range(NEW):
            logits = forward(model, torch.tensor([ids[-1:]]), cache).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[1:]


def layers_of(cache: DynamicCache) -> Layers:
    return [(layer.keys, layer.values) for layer in cache.layers]


def saved(value: Any) -> dict[str, memoryview]:
    file = io.BytesIO()
    torch.save(value, file)
    return {"x": file.getbuffer()}


def rows_of(layers: Layers) -> ForeignRows:
    rows = get_format("transformers").read(
        saved({"past_key_values": tuple(layers), "input_ids": torch.tensor([PROMPT[:-1]])}), Given()
    )
    assert rows.token_ids is not None
    assert rows.token_ids.tolist() == PROMPT[:-1]
    return rows


def from_torch(path: Path) -> Layers:
    loaded = torch.load(path, weights_only=True)
    assert loaded["input_ids"].tolist() == [PROMPT[:-1]]
    return list(loaded["past_key_values"])


def from_torch_tuple(path: Path) -> Layers:
    return list(torch.load(path, weights_only=True))


def from_safetensors(path: Path) -> Layers:
    tensors = safetensors.torch.load_file(path)
    return [(tensors[f"k_{n}"], tensors[f"v_{n}"]) for n in range(len(tensors) // 2)]


@pytest.mark.parametrize(
    ("name", "with_ids", "load"),
    [
        ("transformers", True, from_torch),
        ("transformers", False, from_torch_tuple),
        ("safetensors", True, from_safetensors),
    ],
)
def test_a_written_file_is_loaded_and_the_model_goes_on(
    name: str, with_ids: bool, load: Callable[[Path], Layers], model: Any, tmp_path: Path
) -> None:
    cache = prefilled(model)
    own = layers_of(cache)
    rows = rows_of(own)
    if not with_ids:
        rows = ForeignRows(**{**vars(rows), "token_ids": None})
    target = get_format(name)
    assert target.write is not None
    (file, data), *_ = target.write(rows, Given()).items()
    (tmp_path / file).write_bytes(data)
    loaded = load(tmp_path / file)
    for mine, theirs in zip(loaded, own, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    restored = DynamicCache()
    for number, (k, v) in enumerate(loaded):
        restored.update(k, v, number)
    assert greedy(model, restored) == greedy(model, prefilled(model))


def test_zeroed_rows_change_the_text(model: Any) -> None:
    """So the comparison above is one: the model reads what it is given."""
    restored = DynamicCache()
    for number, (k, v) in enumerate(layers_of(prefilled(model))):
        restored.update(torch.zeros_like(k), torch.zeros_like(v), number)
    assert greedy(model, restored) != greedy(model, prefilled(model))


def test_every_way_to_save_a_cache_gives_the_same_rows(model: Any, tmp_path: Path) -> None:
    cache = prefilled(model)
    layers = layers_of(cache)
    wanted = rows_of(layers)
    safetensors.torch.save_file(
        {f"{p}_{n}": t for n, layer in enumerate(layers) for p, t in zip("kv", layer, strict=True)},
        tmp_path / "x",
    )
    for files in (
        saved(cache),
        saved(tuple(cache)),
        saved(tuple(layers)),
        {"x": memoryview((tmp_path / "x").read_bytes())},
    ):
        known = recognise(files)
        assert known is not None
        rows = known.read(files, Given())
        assert np.array_equal([rows.k, rows.v], [wanted.k, wanted.v])


def test_caches_of_a_sliding_window_are_refused() -> None:
    model = tiny_models.gemma3().eval()
    with torch.inference_mode():
        long = torch.tensor([[1, *range(3, 103)]])
        cache = DynamicCache(config=model.config)
        forward(model, long, cache)
    read = get_format("transformers").read
    with pytest.raises(Unsupported, match="DynamicSlidingWindowLayer"):
        read(saved(cache), Given())
    for value in (tuple(cache), tuple(layers_of(cache))):
        with pytest.raises(Unsupported, match="window"):
            read(saved(value), Given())
