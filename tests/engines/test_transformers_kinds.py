"""The transformers adapter on tiny random models of every kind of cache layer, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import DynamicCache, cache_utils

import kvsnap
from kvsnap.engines.transformers import Transformers, load, save
from kvsnap.engines.transformers_probe import run as forward
from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.testing.state_suite import StateEngineSuite
from kvsnap.testing.tiny_llama import CACHE
from kvsnap.testing.turns import some_ids

pytestmark = pytest.mark.engine

WINDOW = 32
_LINEAR = getattr(cache_utils, "LinearAttentionLayer", None)
STATES = _LINEAR is not None and "number_of_states" in signature(_LINEAR).parameters
"""Before that, recurrent models had caches of their own, then layers of one state."""
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
SHARED = {
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 500,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [96] * 4,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MIXED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": WINDOW}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "expand": 2}
FALCON = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "latent": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "sliding": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "sliding and full": ("Gemma3TextConfig", "Gemma3ForCausalLM", MIXED),
    "chunked": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "interleave_moe_layer_step": 2},
    ),
    "shared KV": ("Gemma3nTextConfig", "Gemma3nForCausalLM", SHARED),
    "linear and full": ("Qwen3NextConfig", "Qwen3NextForCausalLM", DELTA),
    "convolution and full": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"] * 2},
    ),
    "both in a layer": ("FalconH1Config", "FalconH1ForCausalLM", FALCON),
    "recurrent": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
    "learned positions": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_layer": 2, "n_head": 4},
    ),
}
SPANS: dict[str, list[int | None]] = {
    "latent": [None],
    "sliding": [WINDOW - 1],
    "sliding and full": [WINDOW - 1, None],
    "chunked": [WINDOW - 1, None],
    "shared KV": [WINDOW - 1, None],
    "linear and full": [0, None],
    "convolution and full": [0, None],
    "both in a layer": [None, 0],
    "recurrent": [0],
    "learned positions": [None],
}
WITH_STATES = [kind for kind, spans in SPANS.items() if 0 in spans]

_made: dict[str, Any] = {}


def model_of(kind: str) -> Any:
    if kind not in _made:
        config, model, settings = MODELS[kind]
        torch.manual_seed(0)
        _made[kind] = getattr(hf, model)(getattr(hf, config)(**{**BASE, **settings})).eval()
    return _made[kind]


def needs(kind: str) -> Any:
    old = not STATES and kind in WITH_STATES
    return pytest.param(kind, marks=pytest.mark.skipif(old, reason="has a cache of its own there"))


KINDS = [needs(kind) for kind in MODELS]
IDS = some_ids(200, 12, 498)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """Models this small gain nothing from more, and lose much where other tests run beside them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvsnap.Store(tmp_path / "store") as store:
        yield store


def run(model: Any, ids: Any, cache: Any) -> None:
    forward(model, torch.tensor([[int(n) for n in ids]]), cache)


@pytest.mark.parametrize(
    "kind", [needs(k) for k in ("sliding and full", "linear and full", "sliding")]
)
class TestTransformersKeepsTheContractOfStates(StateEngineSuite):
    vocabulary = 498

    @pytest.fixture(autouse=True)
    def _kind(self, kind: str) -> None:
        self.kind = kind

    def make(self) -> Transformers:
        return Transformers(model_of(self.kind))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_says_what_each_layer_keeps(kind: str) -> None:
    groups = Transformers(model_of(kind)).layout.groups
    assert [group.span for group in groups] == SPANS[kind]


@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 64, 65, 150])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_model_goes_on_bit_for_bit(kind: str, length: int, store: kvsnap.Store) -> None:
    through = Transformers(model_of(kind))
    session = kvsnap.Session(store, through, "s")
    session.resume(IDS[:length])
    through.evaluate(IDS[:length])
    session.save()
    resumed = Transformers(model_of(kind))
    report = kvsnap.Session(store, resumed, "s").resume(IDS[: length + 40])
    assert report.reused_tokens == length, report.stopped_by
    for engine in (through, resumed):
        engine.evaluate(IDS[length : length + 40])
    assert resumed.evaluated == 40
    assert torch.equal(resumed._logits, through._logits)
    if through.layout.needs_state:
        there = through.export_state()
        for name, array in resumed.export_state().items():
            assert np.array_equal(array, there[name]), name


@pytest.mark.parametrize("kind", [k for k in KINDS if k.values != ("recurrent",)])
def test_generate_goes_on_after_load_and_save(kind: str, store: kvsnap.Store) -> None:
    model, prompt = model_of(kind), torch.tensor([[int(n) for n in IDS[:100]]])
    whole = model.generate(prompt, max_new_tokens=8, do_sample=False)
    cache, _ = load(store, model, prompt, name="chat")
    half = model.generate(prompt, max_new_tokens=4, do_sample=False, **{CACHE: cache})
    assert save(store, model, cache, half, name="chat").tokens == 103
    cache, reused = load(store, model, half, name="chat")
    assert reused == 103
    assert model.generate(half, max_new_tokens=4, do_sample=False, **{CACHE: cache}).tolist() == (
        whole.tolist()
    )


@pytest.mark.parametrize("kind", [needs(k) for k in ("sliding and full", *WITH_STATES)])
def test_a_branch_goes_on_from_a_checkpoint(kind: str, store: kvsnap.Store) -> None:
    engine = Transformers(model_of(kind))
    session = kvsnap.Session(store, engine, "s")
    session.resume(IDS[:150])
    engine.evaluate(IDS[:100])
    session.checkpoint()
    engine.evaluate(IDS[100:150])
    session.save()
    other = Transformers(model_of(kind))
    branch = [*IDS[:100], *IDS[:30]]
    report = kvsnap.Session(store, other).resume(branch)
    assert report.reused_tokens == 100, report.stopped_by
    other.evaluate(IDS[:30])
    cold = Transformers(model_of(kind))
    for piece in (IDS[:100], IDS[:30]):
        cold.evaluate(piece)
    assert torch.equal(other._logits, cold._logits)


def test_a_window_goes_back_as_far_as_its_rows_are_there() -> None:
    engine = Transformers(model_of("sliding and full"))
    engine.evaluate(IDS[: WINDOW - 1])
    assert (engine.reach(20), engine.reach(0), engine.reach(90)) == (20, 0, WINDOW - 1)
    engine.truncate(20)
    assert engine.cache.get_seq_length() == len(engine.token_ids()) == 20
    engine.evaluate(IDS[20:60])
    cold = Transformers(model_of("sliding and full"))
    for piece in (IDS[:20], IDS[20:60]):
        cold.evaluate(piece)
    assert torch.equal(engine._logits, cold._logits)
    assert (engine.reach(59), engine.reach(60)) == (0, 60)
    with pytest.raises(UsageError, match="cannot go back to 59"):
        engine.truncate(59)
    engine.truncate(0)
    assert len(engine.token_ids()) == 0


@pytest.mark.parametrize("kind", [needs(kind) for kind in WITH_STATES])
def test_a_recurrent_state_does_not_go_back(kind: str) -> None:
    engine = Transformers(model_of(kind))
    engine.evaluate(IDS[:20])
    assert (engine.reach(20), engine.reach(19)) == (20, 0)


def test_a_cache_whose_window_lacks_rows_is_refused() -> None:
    model, cache = (
        model_of("sliding and full"),
        DynamicCache(config=model_of("sliding and full").config),
    )
    run(model, IDS[:60], cache)
    Transformers(model, cache, IDS[:60])
    layer = cache.layers[0]
    layer.keys, layer.values = layer.keys[:, :, -9:], layer.values[:, :, -9:]
    with pytest.raises(Unsupported, match="lacks rows"):
        Transformers(model, cache, IDS[:60])
    layer.cumulative_length = 9
    with pytest.raises(Unsupported, match=r"hold \[9, 60\] tokens"):
        Transformers(model, cache, IDS[:60])


def test_a_cache_of_other_layers_than_the_models_own_is_refused() -> None:
    """`DynamicCache()` without a configuration keeps all rows of a windowed layer."""
    model, cache = model_of("sliding and full"), DynamicCache()
    run(model, IDS[:60], cache)
    with pytest.raises(Unsupported, match="DynamicLayer where this model's has others"):
        Transformers(model, cache, IDS[:60])


@pytest.mark.skipif(not STATES, reason="has a cache of its own there")
def test_a_cache_that_does_not_tell_its_length_is_refused() -> None:
    model = model_of("recurrent")
    cache = DynamicCache(config=model.config)
    run(model, IDS[:60], cache)
    with pytest.raises(Unsupported, match="does not say how many tokens it holds"):
        Transformers(model, cache, IDS[:60])


def test_batches_of_models_with_a_window_are_refused(store: kvsnap.Store) -> None:
    model = model_of("sliding and full")
    ids = torch.tensor([[int(n) for n in IDS[:20]]] * 2)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    with pytest.raises(Unsupported, match="rows of batches of models with sliding-window"):
        save(store, model, cache, ids, row=0, attention_mask=torch.ones_like(ids))


ENCODER = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
T5 = {"d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "vocab_size": 99}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "both directions": (
        lambda: hf.BertModel(hf.BertConfig(num_hidden_layers=2, **ENCODER)),
        "depend on what follows",
    ),
    "encoder-decoder": (
        lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)),
        "encoder-decoder models",
    ),
    "no cache": (
        lambda: hf.RwkvForCausalLM(
            hf.RwkvConfig(hidden_size=64, num_hidden_layers=2, vocab_size=99)
        ),
        "keeps no KV cache",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_models_that_cannot_be_restored_are_refused_by_name(why: str) -> None:
    make, told = REFUSED[why]
    with pytest.raises(Unsupported, match=told):
        Transformers(make().eval())


@pytest.mark.skipif(not hasattr(hf, "DeepseekV32Config"), reason="newer than this release")
def test_sparse_attention_with_an_indexer_is_refused_by_its_layers_name() -> None:
    config = hf.DeepseekV32Config(**{**BASE, **LATENT})
    with pytest.raises(Unsupported, match="class DynamicIndexedLayer"):
        Transformers(hf.DeepseekV32ForCausalLM(config).eval())


@pytest.mark.skipif(STATES, reason="recurrent models keep what is known")
def test_recurrent_models_of_older_releases_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"with a DynamicCache|as this release of"):
        Transformers(model_of("recurrent"))


@pytest.mark.parametrize(
    ("config", "model", "pairing", "dims"),
    [
        ("CohereConfig", "CohereForCausalLM", "interleaved", 16),
        ("Glm4Config", "Glm4ForCausalLM", "interleaved", 8),
        ("Qwen3Config", "Qwen3ForCausalLM", "halves", 16),
    ],
)
def test_how_k_is_rotated_is_found_not_guessed(
    config: str, model: str, pairing: str, dims: int
) -> None:
    made = getattr(hf, model)(getattr(hf, config)(**BASE)).eval()
    rope = Transformers(made).layout.planes()["full.k"][1].rope
    assert rope is not None
    assert (rope.pairing, rope.dims) == (pairing, dims)


def test_what_is_no_model_of_transformers_is_refused() -> None:
    with pytest.raises(Unsupported, match="a Linear is no transformers model"):
        Transformers(torch.nn.Linear(2, 2))


def test_media_tokens_are_refused() -> None:
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**BASE, "num_hidden_layers": 1})).eval()
    model.config.image_token_id = 77
    with pytest.raises(Unsupported, match="ids do not tell images apart"):
        Transformers(model).evaluate(np.array([1, 77, 2], np.uint32))
