"""The transformers adapter where the model is on a GPU: the same rows, through pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

import kvsnap
from kvsnap.engines import Transformers, transformers_cache
from kvsnap.engines.base import Landing
from kvsnap.engines.transformers import load, save
from kvsnap.formats.codecs import CODECS, get_codec
from kvsnap.testing import untaught
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.tiny_llama import CACHE, tiny_llama
from kvsnap.testing.turns import some_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

LOSSY = [codec for codec in CODECS if get_codec(codec).lossy]
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


class OnHost(Transformers):
    """Takes decoded rows through host memory."""

    def lossy_landing(self, stop: int, start: int = 0) -> Landing:
        return self.landing(stop, start)


class OnDevice(Transformers):
    """`places`: where the rows of blocks landed."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.places: list[str] = []

    def lossy_landing(self, stop: int, start: int = 0) -> Landing:
        landing = super().lossy_landing(stop, start)
        for rows in landing.rows.values():
            self.places.append(rows.device.type if isinstance(rows, torch.Tensor) else "host")
        return landing


def saved(path: Path, model: Any, codec: str, ids: Any) -> kvsnap.Store:
    store, engine = kvsnap.Store(path), Transformers(model)
    weights = engine.identity(64, lambda path: "").weights
    store.calibrations.put(untaught.untaught(engine.layout, weights))
    session = kvsnap.Session(store, engine, "s", codec=codec)
    session.resume(ids)
    engine.evaluate(ids)
    session.save()
    return store


def assert_resumes_alike(store: kvsnap.Store, model: Any, ids: Any, reused: int) -> OnDevice:
    host, device = OnHost(model), OnDevice(model)
    reports = [kvsnap.Session(store, engine, "s").resume(ids) for engine in (host, device)]
    assert reports[0] == reports[1]
    assert (reports[1].reused_tokens, reports[1].damage) == (reused, ())
    assert device.held_fidelity() == host.held_fidelity() != "exact"
    pairs = zip(host._rows.tensors(host.cache), device._rows.tensors(device.cache), strict=True)
    for mine, its in pairs:
        assert its.device == mine.device
        assert its.stride() == mine.stride()
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
    return device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_blocks_become_the_same_rows_on_the_gpu(
    codec: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untaught, "SPREAD", 0.3)
    ids, model = some_ids(500, 5), tiny(dtype)
    with saved(tmp_path, model, codec, ids) as store:
        for prompt, reused in ((ids, 499), (ids[:128], 127)):
            assert set(assert_resumes_alike(store, model, prompt, reused).places) == {"cuda"}


def test_rows_decoded_on_the_gpu_are_there_for_any_stream(tmp_path: Path) -> None:
    ids, model = some_ids(500, 6), tiny()
    with saved(tmp_path, model, "q4", ids) as store, torch.inference_mode():
        for _ in range(20):
            with torch.cuda.stream(torch.cuda.Stream()):
                assert_resumes_alike(store, model, ids, 499)


def test_a_gpu_without_room_leaves_the_rows_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_cache, "_DECODING", 2**50)
    ids, model = some_ids(200, 7), tiny()
    with saved(tmp_path, model, "q8", ids) as store:
        assert set(assert_resumes_alike(store, model, ids, 199).places) == {"host"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_model_on_the_second_gpu(tmp_path: Path) -> None:
    ids, model = some_ids(500, 8), tiny(device="cuda:1")
    with saved(tmp_path, model, "q8", ids) as store:
        assert set(assert_resumes_alike(store, model, ids, 499).places) == {"cuda"}
