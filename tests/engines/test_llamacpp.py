"""The llama.cpp adapter on the bundled model, through the paths an application uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import BadTokenIds, DoesNotFit, EngineError, KvsnapError, Unsupported
from kvsnap.testing.engine_suite import EngineSuite

pytestmark = pytest.mark.engine

TEXT = "The old library by the river opens at nine and closes at five, but on Sundays it rests. "


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[llama_cpp.Llama]:
    llm = make(model)
    yield llm
    llm.close()


def make(model: Path, **settings: Any) -> llama_cpp.Llama:
    return llama_cpp.Llama(str(model), verbose=False, **{"n_ctx": 512, **settings})


class Counter:
    """Counts the tokens that are really decoded."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self.tokens = 0
        self.decode = llm._ctx.decode

    def __call__(self, batch: Any) -> None:
        self.tokens += batch.batch.n_tokens
        self.decode(batch)


@pytest.fixture
def saved(llm: llama_cpp.Llama, tmp_path: Path) -> tuple[kvsnap.Store, list[int]]:
    """A session of a text that ends inside a block."""
    llm.reset()
    ids = llm.tokenize((TEXT * 9).encode())[:150]
    store = kvsnap.Store(tmp_path / "store")
    engine = LlamaCpp(llm)
    engine.evaluate(np.array(ids, np.uint32))
    kvsnap.Session(store, engine, "s").save()
    llm.reset()
    return store, ids


class TestLlamaCppKeepsTheContract(EngineSuite):
    vocabulary = 20000

    @pytest.fixture(autouse=True)
    def _model(self, model: Path) -> None:
        self.model = model

    def make(self, **settings: Any) -> LlamaCpp:
        return LlamaCpp(make(self.model, **settings))

    def make_other_batch(self) -> LlamaCpp:
        return self.make(n_batch=32)


def resumed(model: Path, saved: tuple[kvsnap.Store, list[int]], **settings: Any) -> Any:
    """A new context that resumed the session, with what it decodes from here on."""
    store, ids = saved
    llm = make(model, **settings)
    report = kvsnap.Session(store, LlamaCpp(llm), "s").resume(ids)
    counter = Counter(llm)
    llm._ctx.decode = counter
    return llm, report, counter


def test_completion_goes_on_from_the_restored_prefix(
    model: Path, saved: tuple[kvsnap.Store, list[int]]
) -> None:
    llm, report, counter = resumed(model, saved)
    assert report.reused_tokens == len(saved[1]) - 1
    done = llm.create_completion(saved[1], max_tokens=5, temperature=0.0)
    assert done["usage"]["completion_tokens"] == 5
    assert counter.tokens == 1 + 4  # the last prompt token, then each new one but the last
    cold = make(model).create_completion(saved[1], max_tokens=5, temperature=0.0)
    assert done["choices"][0]["text"] == cold["choices"][0]["text"]


def test_chat_completion_goes_on_from_the_restored_prefix(
    model: Path, llm: llama_cpp.Llama, tmp_path: Path
) -> None:
    messages: Any = [{"role": "system", "content": TEXT * 8}, {"role": "user", "content": "Hi"}]
    llm.reset()
    engine = LlamaCpp(llm)
    ids = engine.tokenize(engine.render(messages, answer=True), first=True, chat=True)
    engine.evaluate(ids)
    store = kvsnap.Store(tmp_path / "store")
    kvsnap.Session(store, engine, "chat").save()
    # A warm-up request before the resume must not matter.
    llm.create_completion("Something else entirely", max_tokens=2)
    kvsnap.Session(store, engine, "chat").resume(ids)
    counter = Counter(llm)
    llm._ctx.decode = counter  # type: ignore[method-assign]
    try:
        llm.create_chat_completion(messages, max_tokens=3, temperature=0.0)
    finally:
        llm._ctx.decode = counter.decode  # type: ignore[method-assign]
    assert counter.tokens <= 1 + 2


def test_saving_does_not_disturb_the_running_engine(model: Path, tmp_path: Path) -> None:
    llm = make(model)
    ids = llm.tokenize((TEXT * 5).encode())
    store = kvsnap.Store(tmp_path / "store")

    def answer(save: bool) -> list[int]:
        llm.reset()
        tokens, found = llm.generate(ids, temp=0.8), []
        llm.set_seed(7)
        for _, token in zip(range(12), tokens, strict=False):
            found.append(int(token))
            if save:
                kvsnap.Session(store, LlamaCpp(llm), "s").save()
        return found

    llm.set_seed(7)
    plain = answer(save=False)
    llm.set_seed(7)
    assert answer(save=True) == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"n_ctx": 160}, {"n_ctx": 2048}, {"n_batch": 32}, {"logits_all": True},
        {"n_ctx": 160, "n_batch": 16, "flash_attn": True},
    ],
    ids=str,
)  # fmt: skip
def test_contexts_of_other_sizes_and_options_resume_alike(
    model: Path, saved: tuple[kvsnap.Store, list[int]], settings: dict[str, Any]
) -> None:
    llm, report, _ = resumed(model, saved, **settings)
    assert report.reused_tokens == len(saved[1]) - 1
    new = [int(t) for _, t in zip(range(3), llm.generate(saved[1], temp=0.0), strict=False)]
    assert len(new) == 3


def test_a_context_smaller_than_the_session_refuses_up_front(
    model: Path, saved: tuple[kvsnap.Store, list[int]]
) -> None:
    store, ids = saved
    engine = LlamaCpp(make(model, n_ctx=100))
    session = kvsnap.Session(store, engine, "s")
    engine.evaluate(np.array(ids[:20], np.uint32))
    with pytest.raises(DoesNotFit, match="100"):
        session.resume(ids)
    assert engine.token_ids().tolist() == ids[:20]


def test_a_sessions_files_hold_its_rows_and_no_logits(
    saved: tuple[kvsnap.Store, list[int]], tmp_path: Path
) -> None:
    rows = len(saved[1]) * 30 * 3 * 64 * 2 * 2
    stored = sum(p.stat().st_size for p in (tmp_path / "store").rglob("*.safetensors"))
    assert stored <= rows + 20_000


def test_resident_tokens_stay_and_only_the_missing_are_read(
    model: Path, saved: tuple[kvsnap.Store, list[int]]
) -> None:
    store, ids = saved
    engine = LlamaCpp(make(model))
    engine.evaluate(np.array(ids[:40], np.uint32))
    before = {name: rows.copy() for name, rows in engine.export(0, 40).items()}
    report = kvsnap.Session(store, engine, "s").resume(ids)
    assert (report.reused_tokens, report.from_store) == (len(ids) - 1, len(ids) - 1 - 40)
    after = engine.export(0, 40)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_an_embedding_context_is_refused_by_name(model: Path) -> None:
    with pytest.raises(Unsupported, match="embedding"):
        LlamaCpp(make(model, embedding=True))


def test_a_media_handler_is_refused_by_name(model: Path) -> None:
    llm = make(model)
    llm.chat_handler = type("Handler", (), {"clip_model_path": "mmproj.gguf"})()
    with pytest.raises(Unsupported, match="media"):
        LlamaCpp(llm)


def test_a_non_causal_context_is_refused_by_name(model: Path) -> None:
    settings = {"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}
    with pytest.raises(Unsupported, match="non-causal"):
        LlamaCpp(make(model, **settings))


def test_a_memory_that_was_cleared_behind_the_llamas_back_is_not_believed(model: Path) -> None:
    llm = make(model)
    engine = LlamaCpp(llm)
    engine.evaluate(np.arange(1000, 1100, dtype=np.uint32))
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    assert len(engine.token_ids()) == 0
    engine.evaluate(np.arange(1100, 1110, dtype=np.uint32))  # positions 100.. without 0..99
    assert len(engine.token_ids()) == 0


def test_a_model_file_that_was_replaced_gives_no_identity(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(model.read_bytes())
    engine = LlamaCpp(make(copy))
    store = kvsnap.Store(tmp_path / "store")
    kvsnap.Session(store, engine, "s")
    (tmp_path / "new").write_bytes(b"GGUF of something else")
    (tmp_path / "new").rename(copy)
    with pytest.raises(EngineError, match="changed since the engine loaded it"):
        kvsnap.Session(store, engine, "s")


def test_the_long_rope_factors_follow_the_models_own_length(model: Path) -> None:
    llm = make(model, n_ctx=512, yarn_orig_ctx=65536)
    llm.metadata["llama.rope.scaling.original_context_length"] = "256"
    rope = LlamaCpp(llm).facts.rope
    assert rope is not None
    assert (rope.long_context, rope.original_context) == (True, 65536)


def test_a_token_id_beyond_the_vocabulary_is_one_clear_error(model: Path) -> None:
    engine = LlamaCpp(make(model))
    with pytest.raises(BadTokenIds, match="49152") as caught:
        engine.evaluate(np.array([49152], np.uint32))
    assert caught.value.hint
    assert engine.evaluated == 0


def test_an_unknown_state_version_is_refused_before_the_engine_is_touched(
    llm: llama_cpp.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", 5)
    with pytest.raises(Unsupported, match="version 5"):
        LlamaCpp(llm)


def test_rotation_is_in_the_identity_of_quantized_kv(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0}
    facts = LlamaCpp(make(model, **settings)).facts
    assert (facts.rotation_k, facts.rotation_v) == (64, 0)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    assert LlamaCpp(make(model, **settings)).facts.rotation_k == 0


def test_the_weights_digest_is_remembered_and_not_when_the_file_is_young(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kvsnap.Store(tmp_path / "store")
    (tmp_path / "store").mkdir()
    hashed: list[Path] = []
    real = type(store.file_digest)._hash

    def counting(self: Any, path: Path, size: int) -> str:
        hashed.append(path)
        return real(self, path, size)

    monkeypatch.setattr(type(store.file_digest), "_hash", counting)
    assert store.file_digest(model) == store.file_digest(model)
    assert len(hashed) == 1
    young = tmp_path / "young.gguf"
    young.write_bytes(b"GGUF")
    first = store.file_digest(young)
    young.write_bytes(b"GGUG")
    assert store.file_digest(young) != first
    with pytest.raises(KvsnapError, match=r"none\.gguf"):
        store.file_digest(tmp_path / "none.gguf")
