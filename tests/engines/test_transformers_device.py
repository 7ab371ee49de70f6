"""Lossy blocks of a transformers model are decoded on its device; here the CPU stands for one."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import kvsnap
from kvsnap.engines import Transformers, transformers_cache
from kvsnap.engines.base import Landing
from kvsnap.formats.codecs import CODECS, get_codec
from kvsnap.formats.codecs.q8 import Q8
from kvsnap.formats.errors import UsageError
from kvsnap.testing import untaught
from kvsnap.testing.tiny_llama import tiny_llama
from kvsnap.testing.turns import some_ids

pytestmark = pytest.mark.engine

LOSSY = [codec for codec in CODECS if get_codec(codec).lossy]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IDS, OTHER = some_ids(200, 1, 498), some_ids(40, 2, 498)
"""Three blocks and a tail of eight tokens."""
WINDOWED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "sliding_window": 32,
}


class OnDevice(Transformers):
    """Its landings are in torch tensors. `landings` are those that it gave."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.on_gpu = True
        self.landings: list[Landing] = []

    def lossy_landing(self, stop: int, start: int = 0) -> Landing:
        self.landings.append(super().lossy_landing(stop, start))
        return self.landings[-1]

    def on_device(self) -> bool:
        """Whether every row of every token that came from the store came as a tensor."""
        names = self.layout.in_blocks.planes()
        found = [
            isinstance(made.rows[name], torch.Tensor) for made in self.landings for name in names
        ]
        return bool(found) and all(found)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from more, and loses much where other tests run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a random model are small: kvtc then has codes to decode, not kept rows."""
    monkeypatch.setattr(untaught, "SPREAD", 0.3)


def saved(path: Path, model: Any, codec: str, ids: Any = IDS, checkpoint: int = 0) -> kvsnap.Store:
    store, engine = kvsnap.Store(path), Transformers(model)
    weights = engine.identity(64, lambda path: "").weights
    store.calibrations.put(untaught.untaught(engine.layout.in_blocks, weights))
    session = kvsnap.Session(store, engine, "s", codec=codec)
    session.resume(ids)
    engine.evaluate(ids[:checkpoint])
    if checkpoint:
        session.checkpoint()
    engine.evaluate(ids[checkpoint:])
    session.save()
    return store


def resumed(
    store: kvsnap.Store, engine: Transformers, ids: Any = IDS, name: str | None = "s"
) -> Any:
    return kvsnap.Session(store, engine, name, allow_lossy=True).resume(ids)


def assert_same(one: Transformers, other: Transformers) -> None:
    assert one.token_ids().tolist() == other.token_ids().tolist()
    for mine, its in zip(
        one._rows.tensors(one.cache), other._rows.tensors(other.cache), strict=True
    ):
        assert mine.dtype == its.dtype
        assert mine.stride() == its.stride()
        assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


@pytest.fixture(params=DTYPES, ids=str)
def model(request: Any) -> Any:
    return tiny_llama().to(request.param)


PROMPTS: dict[str, tuple[Any, int]] = {
    "all and more": (np.concatenate([IDS, OTHER]), 200),
    "the same again": (IDS, 199),
    "a block but its last token": (IDS[:128], 127),
    "another text after two blocks": (np.concatenate([IDS[:150], OTHER]), 128),
}


@pytest.mark.parametrize("codec", LOSSY)
def test_rows_decoded_on_a_device_are_those_of_the_host(
    model: Any, codec: str, tmp_path: Path
) -> None:
    exact = Transformers(model)
    exact.evaluate(IDS)
    with saved(tmp_path, model, codec) as store:
        for prompt, reused in PROMPTS.values():
            host, device = Transformers(model), OnDevice(model)
            reports = [resumed(store, engine, prompt) for engine in (host, device)]
            assert reports[0] == reports[1]
            assert (reports[1].reused_tokens, reports[1].damage) == (reused, ())
            assert device.on_device()
            assert_same(host, device)
            assert [m.digest for m in device.marks] == [m.digest for m in host.marks] != []
            assert device.held_fidelity() == host.held_fidelity() != "exact"
            rows, own = (engine.export(4, reused) for engine in (exact, device))
            same = min(128, reused) - 4
            assert any((rows[name][:, :same] != own[name][:, :same]).any() for name in rows)


def test_a_device_that_holds_the_front_takes_the_rest(model: Any, tmp_path: Path) -> None:
    with saved(tmp_path, model, "q8") as store:
        host, device = Transformers(model), OnDevice(model)
        for engine in (host, device):
            assert resumed(store, engine, IDS[:128]).reused_tokens == 127
            report = resumed(store, engine)
            assert (report.reused_tokens, report.from_store) == (199, 72)
        assert [landing.start for landing in device.landings] == [0, 127]
        assert device.on_device()
        assert_same(host, device)


@pytest.mark.parametrize("codec", LOSSY)
def test_damage_in_the_middle_is_the_same_miss(codec: str, tmp_path: Path) -> None:
    model, reports = tiny_llama(), []
    engines = [Transformers(model), OnDevice(model)]
    for number, engine in enumerate(engines):
        with saved(tmp_path / str(number), model, codec) as store:
            file = store.place.block(names(store)[1])
            data = bytearray(file.read_bytes())
            data[-100] ^= 1
            file.write_bytes(data)
            reports.append(resumed(store, engine))
    assert reports[0] == reports[1]
    assert (reports[0].reused_tokens, len(reports[0].damage)) == (64, 1)
    assert engines[1].on_device()
    assert [landing.stop for landing in engines[1].landings] == [199, 64]
    assert_same(*engines)


def names(store: kvsnap.Store) -> list[bytes]:
    """Of the stored blocks, in the chain's order."""
    return [bytes(row[0]) for row in store.index.query("SELECT name FROM blocks ORDER BY start")]


@pytest.mark.parametrize("codec", LOSSY)
def test_windows_stay_exact_beside_rows_on_a_device(codec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**WINDOWED, pad_token_id=0)).eval()
    with saved(tmp_path, model, codec, checkpoint=150) as store:
        host, device = Transformers(model), OnDevice(model)
        for prompt, reused in ((IDS, 150), (np.concatenate([IDS, OTHER]), 200)):
            for engine in (host, device):
                assert resumed(store, engine, prompt, None).reused_tokens == reused
            assert device.on_device()
            assert isinstance(device.landings[-1].rows["sliding.k"], np.ndarray)
            assert_same(host, device)


def test_a_session_restored_on_a_device_is_not_stored_as_an_exact_one(tmp_path: Path) -> None:
    model = tiny_llama()
    with saved(tmp_path, model, "q4") as store:
        device = OnDevice(model)
        resumed(store, device, IDS, None)
        device.evaluate(IDS[len(device.token_ids()) :])
        with pytest.raises(UsageError, match="fidelity q4"):
            kvsnap.Session(store, device, "exact").save()


@pytest.mark.parametrize("tier", [None, "10MB"])
def test_exact_chains_and_chains_in_memory_land_on_the_host(
    tier: str | None, tmp_path: Path
) -> None:
    model, codec = tiny_llama(), "q8" if tier else "zstd"
    saved(tmp_path, model, codec).close()
    with kvsnap.Store(tmp_path, ram=tier) as store:
        for hits in (0, 6):
            host, device = Transformers(model), OnDevice(model)
            assert resumed(store, device).reused_tokens == 199
            assert device.landings == []
            assert store.blocks.ram is None or store.blocks.ram.hits == hits
            resumed(store, host)
            assert_same(host, device)


def test_a_resume_in_inference_mode_goes_on(tmp_path: Path) -> None:
    model = tiny_llama()
    with saved(tmp_path, model, "q8") as store, torch.inference_mode():
        device = OnDevice(model)
        assert resumed(store, device).reused_tokens == 199
        assert device.on_device()
        device.evaluate(IDS[199:])


def test_a_device_without_room_leaves_the_rows_to_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama()
    monkeypatch.setattr(transformers_cache, "_DECODING", 2**60)
    with saved(tmp_path, model, "q8") as store:
        host, device = Transformers(model), OnDevice(model)
        for engine in (host, device):
            assert resumed(store, engine).reused_tokens == 199
        assert len(device.landings) == 1
        assert not device.on_device()
        assert_same(host, device)


def test_a_device_that_has_no_room_to_decode_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    model = tiny_llama()
    with saved(tmp_path, model, "q8") as store:
        host, device = Transformers(model), OnDevice(model)
        resumed(store, host)
        monkeypatch.setattr(Q8, "decode_on", full)
        report = resumed(store, device)
        assert (report.reused_tokens, report.damage) == (199, ())
        assert device.on_device()
        assert_same(host, device)


def test_layers_on_several_devices_land_on_the_host() -> None:
    rows = OnDevice(tiny_llama())._rows
    spread = (torch.device("cpu"), torch.device("meta"))
    rows.groups = tuple(dataclasses.replace(group, devices=spread) for group in rows.groups)
    found = rows.device_landing(3, 10)
    assert all(isinstance(plane, np.ndarray) for plane in found.values())
    rows.layout.check(found, 7)


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_no_full_width_rows_are_made_in_host_memory(codec: str, tmp_path: Path) -> None:
    model = tiny_llama(hidden_size=256, num_hidden_layers=8, num_key_value_heads=4)
    ids = some_ids(448, 3, 498)
    with saved(tmp_path, model, codec, ids) as store:
        wide = Transformers(model).layout.size(448)
        assert _peak(lambda: resumed(store, Transformers(model), ids)) > wide
        assert _peak(lambda: resumed(store, OnDevice(model), ids)) < wide / 2


def _peak(work: Callable[[], Any]) -> int:
    """Bytes that numpy and Python took at most meanwhile; torch's tensors are not among them."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
