"""What renames the blocks of a transformers model, and what does not."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from kvsnap.engines import Transformers
from kvsnap.engines.transformers_probe import run
from kvsnap.engines.transformers_weights import weights_digest
from kvsnap.formats.errors import Unsupported
from kvsnap.testing.tiny_llama import tiny_llama

pytestmark = pytest.mark.engine


def identity(model: Any) -> str:
    return Transformers(model).identity(64, lambda path: "").canonical()


def test_equal_models_have_equal_identities_wherever_they_were_loaded_from(
    tmp_path: Any,
) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert identity(loaded) == identity(model) == identity(tiny_llama())
    assert identity(copy.deepcopy(model)) == identity(model)


def test_the_attention_implementation_and_what_steers_generation_are_not_in_it() -> None:
    model, other = (
        tiny_llama(),
        tiny_llama(attn_implementation="eager", use_cache=False, eos_token_id=7),
    )
    other.config._name_or_path = "elsewhere"
    assert identity(other) == identity(model)


def test_a_compiled_model_is_the_same_model() -> None:
    model = tiny_llama()
    assert identity(torch.compile(model, backend="eager")) == identity(model)


def merge(weight: torch.nn.Parameter) -> None:
    """As adapters are merged: torch's version counter does not move."""
    weight.data += 0.01


def replace(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.01


def poke(weight: torch.nn.Parameter) -> None:
    weight.data[3, 5] += 1.0


def swap(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]


@pytest.mark.parametrize("change", [merge, replace, poke, swap])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "embed_tokens"])
def test_a_change_of_weights_in_memory_changes_it(name: str, change: Any) -> None:
    model = tiny_llama()
    before = identity(model)
    assert identity(model) == before
    change(model.model.get_submodule(name).weight)
    changed = identity(model)
    assert changed != before
    assert changed == identity(copy.deepcopy(model))  # a digest of the bytes, nothing remembered


@pytest.mark.parametrize(
    "settings",
    [
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_settings_that_decide_rows_change_it(settings: dict[str, Any]) -> None:
    other = tiny_llama(**settings)
    if "dtype" in settings:
        other = other.to(settings["dtype"])
    assert identity(other) != identity(tiny_llama())


def test_frequencies_that_somebody_changed_change_it() -> None:
    model = tiny_llama()
    before = identity(model)
    model.model.rotary_emb.inv_freq.mul_(1 + 1e-7)  # as another device computes them
    assert identity(model) == before
    model.model.rotary_emb.inv_freq.mul_(1.01)
    assert identity(model) != before


def test_frequencies_of_another_precision_change_it() -> None:
    """`half()` rounds them, `from_pretrained(dtype=float16)` does not."""
    rounded, kept = tiny_llama().half(), tiny_llama().half()
    kept.model.rotary_emb.inv_freq = tiny_llama().model.rotary_emb.inv_freq
    assert identity(rounded) != identity(kept)


class Tuned(torch.nn.Linear):
    """What peft's layers tell beside their weights."""

    scaling: Mapping[str, float] = {"default": 2.0}
    active_adapters = ("default",)
    disable_adapters = False
    merged_adapters: tuple[str, ...] = ()


def test_adapters_and_their_state_are_in_it() -> None:
    model = tiny_llama()
    plain = identity(model)
    layer = model.model.layers[0].self_attn.q_proj
    layer.__class__ = Tuned
    active = identity(model)
    layer.scaling = {"default": 4.0}
    stronger = identity(model)
    layer.disable_adapters = True
    off = identity(model)
    assert len({plain, active, stronger, off}) == 4


class Packed(torch.nn.Parameter):
    """Four-bit weights whose scales stand elsewhere."""


def test_weights_of_unknown_classes_are_refused_by_name() -> None:
    model = tiny_llama()
    model.model.norm.weight = Packed(model.model.norm.weight.data)
    with pytest.raises(Unsupported, match=r"class Packed .*\(model.norm.weight\)"):
        weights_digest(model)


def test_weights_that_are_not_in_memory_are_refused() -> None:
    model = tiny_llama()
    model.model.norm.weight = torch.nn.Parameter(torch.empty(32, device="meta"))
    with pytest.raises(Unsupported, match=r"norm\.weight are not in memory"):
        weights_digest(model)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(Unsupported, match="training mode"):
        Transformers(tiny_llama().train())


def test_rope_that_follows_the_length_is_refused_or_bounded() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(Unsupported, match="'dynamic' a prefix depends on what follows"):
        Transformers(tiny_llama(rope_parameters=dynamic))
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    model = tiny_llama(rope_parameters=long)
    assert Transformers(model).capacity == 32
    ids = list(range(33))
    before = identity(model)
    cache = DynamicCache(config=model.config)
    run(model, torch.tensor([ids]), cache)
    with pytest.raises(Unsupported, match="beyond 32 tokens"):
        Transformers(model, cache, ids)
    assert identity(model) == before
