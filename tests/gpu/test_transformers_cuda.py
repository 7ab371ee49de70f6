"""The transformers adapter where the model is on a GPU: the same rows, through pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import kvsnap
from kvsnap.engines import Transformers
from kvsnap.engines.transformers import load, save
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.tiny_llama import CACHE, tiny_llama
from kvsnap.testing.turns import some_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tiny(dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> LlamaForCausalLM:
    model = tiny_llama(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, eos_token_id=None
    )
    return model.to(dtype).to(device)


def identity(model: Any) -> str:
    return Transformers(model).identity(64, lambda path: "").canonical()


class TestTransformersOnAGpuKeepsTheContract(EngineSuite):
    @pytest.fixture(autouse=True)
    def _model(self) -> None:
        self.model = tiny()

    def make(self) -> Transformers:
        return Transformers(self.model)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_bits_of_the_cache(dtype: torch.dtype) -> None:
    engine = Transformers(tiny(dtype))
    assert engine.on_gpu
    engine.evaluate(some_ids(130, 1))
    rows = engine.export(3, 117)
    for number, layer in enumerate(engine.cache.layers):
        for plane, tensor in (("full.k", layer.keys), ("full.v", layer.values)):
            own = tensor[0, :, 3:117].transpose(0, 1).reshape(114, -1).contiguous().cpu()
            bits = own.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
            assert rows[plane][number].tobytes() == bits.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_restored_model_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    ids, model = some_ids(300, 2), tiny(dtype)
    through = Transformers(model)
    with kvsnap.Store(tmp_path) as store:
        kvsnap.Session(store, through, "s").resume(ids[:200])
        through.evaluate(ids[:200])
        kvsnap.Session(store, through, "s").save()
        resumed = Transformers(model)
        report = kvsnap.Session(store, resumed, "s").resume(ids)
        assert report.reused_tokens == 200
        assert {layer.keys.device.type for layer in resumed.cache.layers} == {"cuda"}
        for engine in (through, resumed):
            engine.evaluate(ids[200:])
        assert through._logits is not None
        assert resumed._logits is not None
        assert torch.equal(through._logits, resumed._logits)


def test_generate_goes_on_from_what_was_loaded(tmp_path: Path) -> None:
    model, prompt = tiny(), torch.from_numpy(some_ids(200, 3).astype(np.int64))[None].cuda()
    with kvsnap.Store(tmp_path) as store:
        cache, _ = load(store, model, prompt)
        first = model.generate(prompt, max_new_tokens=8, do_sample=False, **{CACHE: cache})
        assert save(store, model, cache, first).blocks_written == 3
        cache, reused = load(store, model, prompt)
        assert reused == 192
        again = model.generate(prompt, max_new_tokens=8, do_sample=False, **{CACHE: cache})
        assert again.tolist() == first.tolist()


def test_the_device_is_not_part_of_the_identity(tmp_path: Path) -> None:
    assert identity(tiny(device="cuda")) == identity(tiny(device="cpu"))
    ids = some_ids(130, 4)
    with kvsnap.Store(tmp_path) as store:
        here = Transformers(tiny())
        here.evaluate(ids)
        save(store, here.model, here.cache, ids)
        assert load(store, tiny(device="cpu"), ids)[1] == 128


def test_weights_that_change_on_the_device_are_seen() -> None:
    model = tiny()
    before = identity(model)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)
    changed = identity(model)
    assert changed != before
    assert identity(model) == changed
