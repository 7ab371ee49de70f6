"""llama.cpp's other memories: sliding windows, recurrent states, hybrids. Tiny models with random
weights; the real one is in tests/cli/test_sliding_window.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.engines.base import Engine
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.state_suite import StateEngineSuite
from kvsnap.testing.tiny_gguf import write_tiny
from kvsnap.testing.turns import some_ids

pytestmark = pytest.mark.engine

VOCABULARY = 250
Settings = dict[str, Any]
CUT_ANYWHERE = {
    "windows that are all kept": ("gemma3", {}, {}),
    "windows only, all kept": ("gemma3", {"pattern": 100}, {}),
    "windows, flash attention": ("gemma3", {}, {"flash_attn": True}),
}
WITH_STATE = {
    "windows": ("gemma3", {}, {"swa_full": False}),
    "windows, flash attention": ("gemma3", {}, {"swa_full": False, "flash_attn": True}),
    "windows only, flash attention": (
        "gemma3",
        {"pattern": 100},
        {"swa_full": False, "flash_attn": True},
    ),
    "recurrent": ("mamba", {}, {}),
    "hybrid": ("jamba", {}, {}),
    "hybrid with short convolutions": ("lfm2", {"window": 0}, {}),
    "hybrid with windows": ("lfm2", {"window": 32}, {"flash_attn": True}),
    "hybrid with windows, cut": ("lfm2", {"window": 32}, {"swa_full": False, "flash_attn": True}),
}


class Models:
    """Contexts of tiny models, closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open: list[llama_cpp.Llama] = []

    def make(self, architecture: str, sizes: Settings, settings: Settings) -> llama_cpp.Llama:
        text = "-".join(f"{key}{value}" for key, value in sorted(sizes.items()))
        path = self.folder / f"{architecture}-{text}.gguf"
        if not path.exists():
            write_tiny(path, architecture, **sizes)
        defaults = {"n_ctx": 512, "n_batch": 16, "n_threads": 1, "n_threads_batch": 1}
        self.open.append(llama_cpp.Llama(str(path), verbose=False, **defaults, **settings))
        return self.open[-1]

    def close(self) -> None:
        for llm in self.open:
            llm.close()
        self.open.clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def models(folder: Path) -> Iterator[Models]:
    with contextlib.closing(Models(folder)) as made:
        yield made


@pytest.mark.parametrize("kind", CUT_ANYWHERE)
class TestWindowsThatAreAllKept(EngineSuite):
    """They can be cut at any position, as full attention can: the whole contract holds."""

    vocabulary = VOCABULARY

    @pytest.fixture(autouse=True)
    def _models(self, models: Models, kind: str) -> None:
        self.models, self.kind = models, CUT_ANYWHERE[kind]

    def make(self) -> Engine:
        return LlamaCpp(self.models.make(*self.kind))


@pytest.mark.parametrize("kind", [kind for kind in WITH_STATE if kind != "windows"])
class TestMemoriesWithState(StateEngineSuite):
    """All but a window without flash attention: its sums go over cells in an order that a restore
    changes, so what follows is equal within rounding only."""

    vocabulary = VOCABULARY

    @pytest.fixture(autouse=True)
    def _models(self, models: Models, kind: str) -> None:
        self.models, self.kind = models, WITH_STATE[kind]

    def make(self) -> Engine:
        return LlamaCpp(self.models.make(*self.kind))


def logits(engine: LlamaCpp) -> np.ndarray:
    pointer = llama_cpp.llama_get_logits_ith(engine.llm.ctx, -1)
    return np.ctypeslib.as_array(pointer, (engine.llm.n_vocab(),)).copy()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 128, 197, 260])
@pytest.mark.parametrize("kind", [*CUT_ANYWHERE, *WITH_STATE])
def test_logits_after_a_resume_are_those_of_an_engine_that_was_never_interrupted(
    models: Models, tmp_path: Path, kind: str, length: int
) -> None:
    model = WITH_STATE.get(kind) or CUT_ANYWHERE[kind]
    ids = some_ids(length + 20, 5, VOCABULARY)
    through = LlamaCpp(models.make(*model))
    with kvsnap.Store(tmp_path / "store") as store:
        through.evaluate(ids[:length])
        kvsnap.Session(store, through, "s").save()
        through.evaluate(ids[length:])
        resumed = LlamaCpp(models.make(*model))
        report = kvsnap.Session(store, resumed, "s").resume(ids)
        assert (report.reused_tokens, report.damage) == (length, ())
        resumed.evaluate(ids[length:])
    assert resumed.evaluated == 20
    across = length > 256 - 32 and "windows" in kind and model[2].get("swa_full") is False
    if kind == "windows" or across:  # sums go over cells, which were others before
        assert np.abs(logits(resumed) - logits(through)).max() < 0.01
    else:
        assert logits(resumed).tobytes() == logits(through).tobytes()


@pytest.mark.parametrize("kind", WITH_STATE)
def test_the_same_prompt_again_goes_on_from_the_last_blocks_edge(
    models: Models, tmp_path: Path, kind: str
) -> None:
    """What is reused is at most a block and a token short, and greedy text is the same."""
    from kvsnap.kvstore.answer import Answer, generate, prefill

    ids = some_ids(200, 6, VOCABULARY)
    texts, reused = [], []
    with kvsnap.Store(tmp_path / "store") as store:
        for _ in range(2):
            engine = LlamaCpp(models.make(*WITH_STATE[kind]))
            session = kvsnap.Session(store, engine)
            answer = Answer()
            prefill(session, engine, ids, answer, _nothing, leave=1, store_on_the_way=False)
            new = generate(engine, ids, answer, max_tokens=12, temperature=0.0, seed=0)
            texts.append(list(new))
            session.save()
            assert answer.report is not None
            reused.append(answer.report.reused_tokens)
            assert answer.computed_tokens + reused[-1] == 200
    assert reused == [0, 192]
    if kind != "windows":
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", WITH_STATE)
def test_the_library_goes_on_by_itself_from_what_was_restored(
    models: Models, tmp_path: Path, kind: str
) -> None:
    """`Llama.generate` takes the restored prefix for its own, and evaluates the rest only."""
    ids = some_ids(100, 7, VOCABULARY)
    with kvsnap.Store(tmp_path / "store") as store:
        first = LlamaCpp(models.make(*WITH_STATE[kind]))
        first.evaluate(ids[:90])
        kvsnap.Session(store, first, "s").save()
        llm = models.make(*WITH_STATE[kind])
        kvsnap.Session(store, LlamaCpp(llm), "s").resume(ids)
    evaluated = _count(llm)
    next(llm.generate(ids.tolist(), temp=0.0))
    assert evaluated == [10]


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "windows"])
def test_models_of_other_kinds_share_nothing(models: Models, tmp_path: Path, kind: str) -> None:
    ids = some_ids(100, 8, VOCABULARY)
    with kvsnap.Store(tmp_path / "store") as store:
        first = LlamaCpp(models.make(*WITH_STATE[kind]))
        first.evaluate(ids)
        kvsnap.Session(store, first, "s").save()
        for other in {"recurrent", "hybrid", "windows"} - {kind}:
            engine = LlamaCpp(models.make(*WITH_STATE[other]))
            assert kvsnap.Session(store, engine, "s").resume(ids).reused_tokens == 0


def test_an_adapter_made_in_the_middle_of_a_conversation_finds_the_same_layout(
    models: Models,
) -> None:
    empty = LlamaCpp(models.make(*WITH_STATE["hybrid"]))
    llm = models.make(*WITH_STATE["hybrid"])
    llm.eval(some_ids(20, 9, VOCABULARY).tolist())
    engine = LlamaCpp(llm)
    assert engine.layout == empty.layout
    assert len(engine.token_ids()) == 20
    assert len(empty.token_ids()) == 0


def _count(llm: llama_cpp.Llama) -> list[int]:
    """The tokens of each evaluation from now on."""
    counts: list[int] = []
    decode = llm._ctx.decode

    def counted(batch: Any) -> None:
        counts.append(batch.batch.n_tokens)
        decode(batch)

    llm._ctx.decode = counted
    return counts


def _nothing(done: int, total: int) -> None:
    """No bar."""


@pytest.mark.parametrize("back", [10, 100, 250])
def test_going_back_behind_the_window_computes_anew(
    models: Models, tmp_path: Path, back: int
) -> None:
    """`Llama.generate` goes back by itself to where a prompt parts; llama.cpp would go on with a
    hole in the windows, and every later session with it."""
    model = ("gemma3", {}, {"swa_full": False, "flash_attn": True})
    ids = some_ids(600, 10, VOCABULARY)
    other = np.concatenate([ids[: 450 - back], some_ids(40, 11, VOCABULARY)])
    llm = models.make(*model)
    with kvsnap.Store(tmp_path / "store") as store:
        session = kvsnap.Session(store, LlamaCpp(llm))
        llm.eval(ids[:450].tolist())
        next(llm.generate(other.tolist(), temp=0.0))
        through = LlamaCpp(models.make(*model))
        through.evaluate(other)
        assert np.abs(logits(LlamaCpp(llm)) - logits(through)).max() < 0.01
        session.save()
        resumed = LlamaCpp(models.make(*model))
        more = np.append(other, np.uint32(7))
        assert kvsnap.Session(store, resumed).resume(more).reused_tokens == len(other)
        for engine in (resumed, through):
            engine.evaluate(more[len(other) :])
        assert np.abs(logits(resumed) - logits(through)).max() < 0.01


def test_a_window_of_unknown_history_is_not_believed(models: Models, tmp_path: Path) -> None:
    """An adapter that comes late cannot tell whether the Llama went back behind its window."""
    llm = models.make("gemma3", {}, {"swa_full": False})
    llm.eval(some_ids(100, 12, VOCABULARY).tolist())
    engine = LlamaCpp(llm)
    assert len(engine.token_ids()) == 0
    with kvsnap.Store(tmp_path / "store") as store:
        session = kvsnap.Session(store, engine, "s")
        session.resume(some_ids(50, 12, VOCABULARY))
        engine.evaluate(some_ids(50, 12, VOCABULARY))
        assert session.save().tokens == 50


def test_a_cleared_memory_gives_no_empty_layout(models: Models) -> None:
    llm = models.make(*WITH_STATE["hybrid"])
    llm.eval(some_ids(20, 13, VOCABULARY).tolist())
    llm._ctx.kv_cache_clear()
    assert LlamaCpp(llm).layout == LlamaCpp(models.make(*WITH_STATE["hybrid"])).layout
