"""mlx-lm itself loads what kvsnap writes, and kvsnap reads what mlx-lm writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from mlx_lm.models.llama import Model, ModelArgs

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.foreign import ForeignRows, Given
from kvsnap.formats.interchange.mlx_lm import MLX_LM
from tests.interop.mlx_lm_loads import by_row, check_goes_on, describe, held

LAYERS, HEADS, DIM, VOCABULARY = 3, 2, 64, 512
TYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
each_type = pytest.mark.parametrize("kind", TYPES)


@pytest.fixture
def model(kind: str) -> Any:
    """Of random weights, large ones: its greedy tokens do not repeat, and tell much."""
    mx.random.seed(5)
    args = ModelArgs(
        model_type="llama",
        hidden_size=256,
        num_hidden_layers=LAYERS,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        rms_norm_eps=1e-5,
        vocab_size=VOCABULARY,
    )
    made = Model(args)
    weights = [
        (name, (0.2 * mx.random.normal(array.shape) if array.ndim > 1 else array))
        for name, array in _flat(made.parameters())
    ]
    made.load_weights([(name, array.astype(TYPES[kind])) for name, array in weights])
    return made


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict | list):
        return [(prefix[1:], tree)]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [found for key, value in items for found in _flat(value, f"{prefix}.{key}")]


def prompt(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, VOCABULARY, tokens).tolist()


def filled(model: Any, tokens: int, cache: list[Any] | None = None) -> list[Any]:
    cache = make_prompt_cache(model) if cache is None else cache
    model(mx.array([prompt(tokens)]), cache=cache)
    mx.eval([layer.state for layer in cache])
    return cache


def read_back(cache: list[Any], path: Path) -> ForeignRows:
    """As mlx-lm saves it and kvsnap reads it."""
    save_prompt_cache(str(path), cache, {"note": "a test"})
    files = {path.name: memoryview(path.read_bytes())}
    assert MLX_LM.recognise(files)
    return MLX_LM.read(files, Given())


def as_f32(rows: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(rows).view(f"<f{rows.itemsize}").astype(np.float32)


def check_rows(rows: ForeignRows, planes: list[tuple[Any, Any]], kind: str) -> None:
    assert (rows.k_type, rows.v_type, len(rows.k)) == (kind, kind, LAYERS)
    for k, v, wanted in zip(rows.k, rows.v, planes, strict=True):
        for found, plane in zip((k, v), wanted, strict=True):
            values = by_row(plane).reshape(rows.tokens, -1)
            np.testing.assert_array_equal(as_f32(found, kind), values)


@each_type
@pytest.mark.parametrize("tokens", [1, 43, 256, 300])
def test_what_mlx_lm_saves_is_read_row_by_row(
    model: Any, kind: str, tokens: int, tmp_path: Path
) -> None:
    cache = filled(model, tokens)
    rows = read_back(cache, tmp_path / "c.safetensors")
    assert (rows.tokens, rows.inexact) == (tokens, "")
    assert rows.told["note"] == "a test"
    check_rows(rows, [held(layer) for layer in cache], kind)


@each_type
@pytest.mark.parametrize("tokens", [43, 256])
def test_mlx_lm_goes_on_from_what_kvsnap_writes_as_if_it_had_computed_it(
    model: Any, kind: str, tokens: int, tmp_path: Path
) -> None:
    own, ids = filled(model, tokens), prompt(tokens)
    rows = read_back(own, tmp_path / "own.safetensors")
    assert MLX_LM.write is not None
    written = MLX_LM.write(rows, Given(model_name="m"))
    path = tmp_path / "prompt_cache.safetensors"
    path.write_bytes(written[path.name])
    told, found = describe(str(tmp_path / "own.safetensors")), describe(str(path))
    assert found["tokens"] == [tokens]
    assert found["metadata"] == {"model": "m", "tokenizer_config": "{}"}
    same = ("classes", "layers", "stored", "rows_f32_sha256")
    assert {name: found[name] for name in same} == {name: told[name] for name in same}
    check_goes_on(str(path), model, [*ids, 7])


@each_type
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_quantized_caches_are_decoded_as_mlx_does_and_called_inexact(
    model: Any, kind: str, bits: int, group: int, tmp_path: Path
) -> None:
    cache = [layer.to_quantized(group_size=group, bits=bits) for layer in filled(model, 43)]
    rows = read_back(cache, tmp_path / "c.safetensors")
    assert rows.tokens == 43
    assert f"{bits} bits" in rows.inexact
    for layer, k, v in zip(cache, rows.k, rows.v, strict=True):
        for found, parts in ((k, layer.keys), (v, layer.values)):
            exact = [part.astype(mx.float32) for part in parts[1:]]
            plane = mx.dequantize(parts[0], *exact, group_size=group, bits=bits)[..., :43, :]
            wanted = by_row(plane.astype(TYPES[kind])).reshape(43, -1)
            np.testing.assert_array_equal(as_f32(found, kind), wanted)


@pytest.mark.parametrize("kind", ["f16"])
def test_a_rotating_cache_is_read_until_it_rotates(model: Any, kind: str, tmp_path: Path) -> None:
    cache = filled(model, 43, [RotatingKVCache(max_size=64, keep=4) for _ in range(LAYERS)])
    rows = read_back(cache, tmp_path / "c.safetensors")
    assert rows.tokens == 43
    check_rows(rows, [held(layer) for layer in cache], kind)
    for token in prompt(30):
        model(mx.array([[token]]), cache=cache)
    with pytest.raises(Unsupported):
        read_back(cache, tmp_path / "rotated.safetensors")


@pytest.mark.parametrize("kind", ["f32"])
def test_the_tool_compares_nothing(model: Any, kind: str, tmp_path: Path) -> None:
    """A file of fewer layers loads: whether an export fits is the user's to know."""
    path = tmp_path / "c.safetensors"
    save_prompt_cache(str(path), filled(model, 5)[:2])
    assert len(load_prompt_cache(str(path))) == 2
