"""What a vLLM server is told that changes rows is another identity; what changes none is the same one."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvsnap.engines import served_replaced
from kvsnap.engines.vllm_check import discards_weights
from kvsnap.engines.vllm_identity import Identities
from kvsnap.engines.vllm_pages import Pages
from kvsnap.engines.vllm_plan import Facts
from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import Shard
from kvsnap.kvstore.weights import FileDigests
from tests.vllm.lockstep import make_config

RANK = (0, 0)
LORA = SimpleNamespace(lora_name="a", lora_path="", is_3d_lora_weight=False)


@pytest.fixture(scope="module")
def config(tiny_llama: Path) -> Any:
    return make_config(tiny_llama)


def pages(first: int) -> Pages:
    """Of two layers from this one on."""
    caches = {f"layers.{first + n}": torch.zeros(4, 1, 8, 16) for n in range(2)}
    return Pages(caches, 4, 1)


def identities(config: Any, first_layer: int = 0) -> Identities:
    view = pages(first_layer)
    facts = {RANK: Facts(view.layout, view.facts("CPU_ATTN", "NHD", "avx2"), Shard())}
    return Identities(config, facts, 8, lambda path: f"blake3:{path.name}", "0.32.0")


def plain(config: Any, first_layer: int = 0) -> str:
    return identities(config, first_layer).plain()[RANK]


def changed(config: Any, part: str, name: str, value: Any) -> Any:
    owner = SimpleNamespace(**vars(getattr(config, part)))
    for told in ("is_multimodal_model", "architecture"):
        if hasattr(getattr(config, part), told):
            setattr(owner, told, getattr(getattr(config, part), told))
    setattr(owner, name, value)
    return SimpleNamespace(**vars(config) | {part: owner})


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model_config", "dtype", torch.float16),
        ("model_config", "quantization", "fp8"),
        ("model_config", "quantization_config", {"ignore": ["lm_head"]}),
        ("model_config", "model_impl", "transformers"),
        ("model_config", "architecture", "MistralForCausalLM"),
        ("model_config", "model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
        ("cache_config", "cache_dtype", "fp8"),
        ("cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("kernel_config", "moe_backend", "marlin"),
        ("load_config", "load_format", "pt"),
        ("load_config", "ignore_patterns", ["a.safetensors"]),
    ],
)
def test_what_changes_rows_changes_the_identity(
    config: Any, part: str, name: str, value: Any
) -> None:
    assert plain(changed(config, part, name, value)) != plain(config)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("scheduler_config", "max_num_seqs", 3),
        ("cache_config", "num_gpu_blocks", 77),
        ("cache_config", "enable_prefix_caching", False),
        ("model_config", "served_model_name", "another"),
    ],
)
def test_what_changes_no_rows_does_not(config: Any, part: str, name: str, value: Any) -> None:
    assert plain(changed(config, part, name, value)) == plain(config)


def test_other_layers_of_equal_shapes_are_other_blocks(config: Any) -> None:
    """A pipeline that is cut elsewhere: the same rank, as many layers, and not the same ones."""
    assert plain(config, 8) != plain(config, 12)


def test_precision_from_the_environment_is_part_of_it(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plain(config)
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert plain(config) != before


def test_a_model_option_that_names_another_model_is_refused(
    config: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    facts = {RANK: Facts(pages(0).layout, (), Shard())}

    def told(place: Path) -> Identities:
        digest = FileDigests(tmp_path / "memo.json")
        return Identities(config, facts, 8, digest, "0.32.0", str(place))

    same, other = tmp_path / "same", tmp_path / "other"
    shutil.copytree(tiny_llama, same)
    shutil.copytree(tiny_llama, other)
    assert told(same).weights == told(tiny_llama).weights
    (other / "model.safetensors").write_bytes(b"others")
    with pytest.raises(UsageError, match="vLLM serves other weights"):
        told(other)


def test_what_vllm_makes_of_an_adapter_is_part_of_it(config: Any, tmp_path: Path) -> None:
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / name).write_bytes(b"{}")
    told = {"target_modules": None, "lora_dtype": torch.bfloat16}
    told |= {"enable_mixed_moe_lora_format": False, "enable_moe_shared_loras": False}
    lora = SimpleNamespace(**vars(LORA) | {"lora_path": str(tmp_path)})

    def family(**more: Any) -> str:
        loras = SimpleNamespace(**told | more)
        return identities(SimpleNamespace(**vars(config) | {"lora_config": loras})).with_lora(lora)[
            RANK
        ]

    every = {family(), family(lora_dtype=torch.float16), family(target_modules=["q_proj"])}
    assert len(every | {plain(config)}) == 4


def test_a_sleep_that_discards_weights_counts_as_replacing_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_replaced, "_replaced_by", [])
    slept: list[int] = []
    worker = type("Worker", (), {"sleep": lambda self, level=1: slept.append(level)})
    served_replaced.watch(worker, ("sleep",), discards_weights)
    worker().sleep()
    worker().sleep(1)
    assert not served_replaced.weights_replaced()
    worker().sleep(level=2)
    assert served_replaced.weights_replaced()
    assert slept == [1, 1, 2]
