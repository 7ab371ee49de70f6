"""The transformers adapter on a tiny random Llama, through the paths an application uses."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache, cache_utils

import kvsnap
from kvsnap.engines import Transformers, get_engine
from kvsnap.engines.transformers import load, save
from kvsnap.formats.errors import BadTokenIds, DoesNotFit, EngineError, Unsupported, UsageError
from kvsnap.formats.identity import differences
from kvsnap.formats.layout import PlaneRope
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.tiny_llama import CACHE, tiny_llama
from kvsnap.testing.turns import resume_cases, some_ids, turn

pytestmark = pytest.mark.engine

WORKER = Path(__file__).with_name("transformers_worker.py")
BLOCK = 64
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    """A model this small gains nothing from more, and loses much where other tests run beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with kvsnap.Store(tmp_path / "store") as store:
        yield store


def evaluated(model: Any, ids: Any, **settings: Any) -> Transformers:
    engine = Transformers(model, **settings)
    engine.evaluate(np.asarray(ids, np.uint32))
    return engine


def generated(model: Any, ids: Any, cache: Any = None, new: int = 5) -> torch.Tensor:
    return model.generate(
        torch.tensor([[int(n) for n in ids]]),
        max_new_tokens=new,
        do_sample=False,
        **{CACHE: cache},
    )


class TestTransformersKeepsTheContract(EngineSuite):
    @pytest.fixture(autouse=True)
    def _model(self, model: Any) -> None:
        self.model = model

    def make(self) -> Transformers:
        return Transformers(self.model)

    def make_other_batch(self) -> Transformers:
        return Transformers(self.model, batch_size=32)

    def make_other_weights(self) -> Transformers:
        return Transformers(tiny_llama(seed=1))


@pytest.mark.slow
def test_generate_in_a_new_process_equals_an_uninterrupted_model_bit_for_bit(
    model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "model")
    # Every text has its own first token, so that none shares a prefix with another.
    saved = {f"of {n}": [(n * 7 + 1) % 499, *map(int, some_ids(n, n, 498))][:n] for n in LENGTHS}
    cases = [
        case
        for name, ids in saved.items()
        for case in resume_cases(name, ids, some_ids(40, 99, 498).tolist(), BLOCK)
    ]
    job = {
        "model": str(tmp_path / "model"),
        "dtypes": ["float32", "bfloat16", "float16"],
        "store": str(tmp_path / "store"),
        "saved": saved,
        "cases": cases,
        "greedy": 12,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))

    def run(what: str) -> Any:
        command = [sys.executable, str(WORKER), what, str(tmp_path / "job.json")]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    run("save")
    resumed, reference = run("resume"), run("reference")
    for dtype in job["dtypes"]:
        for case, warm, through in zip(cases, resumed[dtype], reference[dtype], strict=True):
            label = f"{dtype}, {case['saved']}, prompt of {len(case['prompt'])}"
            assert warm["reused"] == case["reused"], label
            assert warm["reused"] + warm["computed"] == len(case["prompt"]), label
            assert warm["logits"] == through["logits"], label
            assert warm["tokens"] == through["tokens"], label
            assert len(warm["tokens"]) == 12, label


def test_save_after_generate_and_load_for_the_next_turn(model: Any, store: kvsnap.Store) -> None:
    prompt = some_ids(70, 3, 498)
    cache, reused = load(store, model, prompt)
    assert reused == 0
    told = generated(model, prompt, cache)
    report = save(store, model, cache, told)  # the last sampled token was not evaluated
    assert report.tokens == told.shape[1] - 1
    assert report.blocks_written == 1
    cache, reused = load(store, model, told)
    assert reused == cache.get_seq_length() == 64
    assert generated(model, told[0], cache).tolist() == generated(model, told[0]).tolist()


def test_a_named_session_keeps_the_tail_too(model: Any, store: kvsnap.Store) -> None:
    prompt = some_ids(70, 3, 498)
    cache, _ = load(store, model, prompt, name="chat")
    told = generated(model, prompt, cache)
    assert save(store, model, cache, told, name="chat").session == "chat"
    cache, reused = load(store, model, [*told[0].tolist(), 9, 8], name="chat")
    assert reused == cache.get_seq_length() == told.shape[1] - 1


def test_each_load_gives_a_cache_of_its_own(model: Any, store: kvsnap.Store) -> None:
    """A prefix cache that grows in place with each use (A63)."""
    ids = some_ids(65, 4, 498)
    save(store, model, evaluated(model, ids).cache, ids)
    first, reused = load(store, model, ids)
    before = [layer.keys.clone() for layer in first.layers]
    generated(model, ids, first)
    assert first.get_seq_length() > reused == 64
    first.layers[0].keys.zero_()
    second, again = load(store, model, ids)
    assert again == second.get_seq_length() == 64
    for layer, keys in zip(second.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_threads_that_load_at_once_do_not_share_a_cache(model: Any, store: kvsnap.Store) -> None:
    ids = [int(n) for n in some_ids(65, 4, 498)]
    save(store, model, evaluated(model, ids).cache, ids)
    wanted = generated(model, ids).tolist()

    def one(_: int) -> tuple[int, Any]:
        cache, reused = load(store, model, ids)
        return reused, generated(model, ids, cache).tolist()

    with ThreadPoolExecutor(2) as pool:
        for reused, told in pool.map(one, range(6)):
            assert (reused, told) == (64, wanted)


@pytest.mark.parametrize("shape", ["list", "one", "rows"])
def test_ids_come_as_a_list_or_a_tensor(model: Any, store: kvsnap.Store, shape: str) -> None:
    ids = [int(n) for n in some_ids(65, 4, 498)]
    given: Any = {"list": ids, "one": torch.tensor(ids), "rows": torch.tensor([ids])}[shape]
    save(store, model, evaluated(model, ids).cache, given)
    assert load(store, model, given)[1] == 64


def test_edits_and_branches_reuse_what_is_before_them(model: Any, store: kvsnap.Store) -> None:
    ids = some_ids(197, 5, 498)
    turn(store, Transformers(model), ids)
    for cut in (1, 63, 64, 65, 100, 128, 190):
        edited = [*ids[:cut], (int(ids[cut]) + 1) % 498, *ids[cut + 1 :]]
        engine = Transformers(model)
        found = turn(store, engine, edited, save=False)
        assert found.resumed.reused_tokens == min(cut, 192), cut
        assert found.computed == 197 - min(cut, 192)
        through = evaluated(model, ids)
        through.truncate(min(cut, 192))
        through.evaluate(np.array(edited[min(cut, 192) :], np.uint32))
        assert torch.equal(engine._logits, through._logits)


def test_loading_is_warm_in_one_process(model: Any, store: kvsnap.Store) -> None:
    ids, engine = some_ids(130, 6, 498), Transformers(model)
    assert turn(store, engine, ids).computed == 130
    warm = turn(store, engine, [*ids, 1, 2])
    assert (warm.resumed.from_store, warm.computed) == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_the_bits_of_the_cache(dtype: torch.dtype) -> None:
    engine = evaluated(tiny_llama().to(dtype), some_ids(20, 1, 498))
    rows = engine.export(3, 17)
    for number, layer in enumerate(engine.cache.layers):
        for plane, tensor in (("full.k", layer.keys), ("full.v", layer.values)):
            own = tensor[0, :, 3:17].transpose(0, 1).reshape(14, -1).contiguous()
            bits = own.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
            assert rows[plane][number].tobytes() == bits.tobytes()
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    assert {plane.dtype for _, plane in engine.layout.planes().values()} == {names[dtype]}


def test_a_cache_that_was_cropped_is_saved_as_long_as_it_is(
    model: Any, store: kvsnap.Store
) -> None:
    ids = some_ids(100, 7, 498)
    cache = evaluated(model, ids).cache
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :70], layer.values[:, :, :70]
    assert save(store, model, cache, ids).tokens == 70
    assert load(store, model, ids)[1] == 64


def test_a_cache_with_more_tokens_than_ids_is_refused(model: Any, store: kvsnap.Store) -> None:
    cache = evaluated(model, some_ids(20, 7, 498)).cache
    with pytest.raises(UsageError, match="holds 20 tokens, and 19"):
        save(store, model, cache, some_ids(20, 7, 498)[:19])


def test_layers_of_different_lengths_are_refused(model: Any) -> None:
    cache = evaluated(model, some_ids(20, 7, 498)).cache
    cache.layers[1].keys = cache.layers[1].keys[:, :, :9]
    cache.layers[1].values = cache.layers[1].values[:, :, :9]
    with pytest.raises(Unsupported, match=r"hold \[9, 20\] tokens"):
        Transformers(model, cache, some_ids(20, 7, 498))
    cache.layers[1].values = cache.layers[0].values
    with pytest.raises(Unsupported, match="keys and values of a cache layer"):
        Transformers(model, cache, some_ids(20, 7, 498))


def test_a_cache_of_another_type_is_refused(model: Any) -> None:
    ids = some_ids(20, 7, 498)
    cache = evaluated(copy.deepcopy(model).to(torch.bfloat16), ids).cache
    with pytest.raises(Unsupported, match=r"keys are torch\.bfloat16"):
        Transformers(model, cache, ids)
    with pytest.raises(Unsupported, match="3 layers where this model's has others"):
        Transformers(model, evaluated(tiny_llama(num_hidden_layers=3), ids).cache, ids)


def test_a_cache_that_others_changed_is_not_trusted_until_they_say_what_it_holds(
    model: Any, store: kvsnap.Store
) -> None:
    ids = some_ids(70, 8, 498)
    session = kvsnap.Session(store, Transformers(model), "s")
    session.resume(ids)
    engine = session.engine
    assert isinstance(engine, Transformers)
    engine.evaluate(ids)
    told = generated(model, [*ids, 5], engine.cache)
    assert len(engine.token_ids()) == 0
    with pytest.raises(UsageError, match="changed by something else"):
        engine.evaluate(ids[:1])
    with pytest.raises(UsageError):
        session.save()
    engine.hold(told[0].tolist())
    assert engine.token_ids().tolist() == told[0, :-1].tolist()
    assert session.save().tokens == told.shape[1] - 1
    engine.cache.layers[0].keys.mul_(2)
    assert len(engine.token_ids()) == 0
    engine.truncate(50)
    assert engine.cache.get_seq_length() == 0


def test_a_failing_forward_leaves_what_was_held(model: Any) -> None:
    engine = evaluated(model, some_ids(20, 7, 498))
    rows = engine.export(0, 20)
    last = model.model.layers[1].mlp

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = last.register_forward_hook(fail)
    try:
        with pytest.raises(EngineError, match="out of memory"):
            engine.evaluate(some_ids(9, 8, 498))
    finally:
        hook.remove()
    assert (len(engine.token_ids()), engine.evaluated) == (20, 20)
    engine.evaluate(some_ids(9, 8, 498))
    for name, array in engine.export(0, 20).items():
        assert np.array_equal(array, rows[name])


def test_ids_that_the_model_lacks_and_too_many_are_refused(model: Any, store: kvsnap.Store) -> None:
    engine = Transformers(model, context=10)
    with pytest.raises(BadTokenIds, match="token id 500"):
        engine.evaluate(np.array([500], np.uint32))
    with pytest.raises(DoesNotFit):
        engine.evaluate(some_ids(11, 1, 498))
    with pytest.raises(UsageError, match="2 sequences"):
        load(store, model, torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded", "encoder-decoder"])
def test_other_caches_are_refused_by_name(
    kind: str, model: Any, store: kvsnap.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized cache's own counter is right while its rows are not (A55)."""
    if kind == "quantized":  # its class asks for a backend package; the layers are what counts
        cache: Any = DynamicCache()
        cache.__class__ = cache_utils.QuantizedCache
    elif kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=32)
    elif kind == "offloaded":
        cache = DynamicCache(config=model.config)
        cache.offloading = True
    else:
        cache = cache_utils.EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(Unsupported, match=f"(?i){kind[:6]}.* are not handled"):
        save(store, model, cache, [1, 2])


def test_layers_of_an_unknown_class_are_refused_by_name(model: Any, store: kvsnap.Store) -> None:
    class CompressedLayer(cache_utils.DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [CompressedLayer(), CompressedLayer()]
    with pytest.raises(Unsupported, match="CompressedLayer"):
        save(store, model, cache, [1, 2])


def test_the_layout_says_how_k_is_rotated(model: Any) -> None:
    planes = Transformers(model).layout.planes()
    assert planes["full.k"][1].rope == PlaneRope(pairing="halves", dims=16, base=10000.0)
    assert planes["full.v"][1].rope is None
    linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    rope = Transformers(tiny_llama(rope_parameters=linear)).layout.planes()["full.k"][1].rope
    assert rope == PlaneRope(pairing="halves", dims=16, base=5e5, scale=0.25)
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    assert Transformers(tiny_llama(rope_parameters=yarn)).layout.planes()["full.k"][1].rope is None


def test_the_engine_is_in_the_table() -> None:
    assert get_engine("transformers") is Transformers


def test_what_the_identity_differs_in_is_told(model: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    here, there = (
        Transformers(m).identity(64, lambda path: "").canonical()
        for m in (model, tiny_llama(rope_parameters=rope))
    )
    assert differences(here, there)[0][0] == "overrides.rope_parameters"
    assert ("rope.base", "10000.0", "20000.0") in differences(here, there)
