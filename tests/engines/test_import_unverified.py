"""Unverified rows stay apart from everybody else's, and models whose layers take turns are not exchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.foreign import GGUF, ForeignRows
from kvsnap.formats.names import token_array
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.interchange.importing import import_rows
from kvsnap.testing.tiny_gguf import write_tiny

pytestmark = pytest.mark.engine
Load = Callable[..., llama_cpp.Llama]
IDS = token_array([1, *np.random.default_rng(3).integers(5, 250, 149)])


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    made: list[llama_cpp.Llama] = []

    def load(architecture: str = "llama", seed: int = 1, **options: Any) -> llama_cpp.Llama:
        path = write_tiny(tmp_path / f"{architecture}{seed}.gguf", architecture, seed=seed)
        made.append(llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, verbose=False, **options))
        return made[-1]

    yield load
    for llm in made:
        llm.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvsnap.Store]:
    with kvsnap.Store(tmp_path / "store") as opened:
        yield opened


def own_rows(llm: llama_cpp.Llama) -> ForeignRows:
    llm.reset()
    engine = LlamaCpp(llm)
    engine.evaluate(IDS)
    target = Target(engine.identity(64, lambda path: "blake3:00"))
    return target.give(engine.export(0, len(IDS)), IDS, GGUF)


def take(store: kvsnap.Store, llm: llama_cpp.Llama, rows: ForeignRows, name: str) -> str:
    llm.reset()
    session = kvsnap.Session(store, LlamaCpp(llm), name)
    return import_rows(session, rows, IDS, unverified=True).saved.fidelity


def test_a_conversation_that_begins_with_the_same_token_stays_exact_in_the_same_engine(
    store: kvsnap.Store, load: Load
) -> None:
    llm, other = load(), np.concatenate([IDS[:1], IDS[1:][::-1]])
    rows = own_rows(llm)  # whose first one is bit for bit that of every prompt
    llm.reset()
    engine = LlamaCpp(llm)
    session = kvsnap.Session(store, engine, "other")
    session.resume(other)
    engine.evaluate(other[:140])
    session.save()
    take(store, llm, rows, "imported")
    report = kvsnap.Session(store, engine, "other").resume(other)
    assert (report.reused_tokens, report.fidelity) == (140, "exact")
    kept = llm.save_state()
    assert kvsnap.Session(store, engine, "imported").resume(IDS).fidelity.startswith("unverified")
    taken = llm.save_state()
    assert kvsnap.Session(store, engine, "other").resume(other).fidelity == "exact"
    # States that an application puts into the engine by itself are known as what they are.
    llm.load_state(taken)
    assert engine.held_fidelity().startswith("unverified")
    llm.load_state(kept)
    assert engine.held_fidelity() == "exact"


def test_other_rows_under_the_same_ids_have_another_root(store: kvsnap.Store, load: Load) -> None:
    """What a reader takes out of a file depends on options, too: the row of a batch, a layout."""
    llm = load()
    rows = own_rows(llm)
    others = dataclasses.replace(rows, k=rows.v, v=rows.k)
    first, second = take(store, llm, rows, "first"), take(store, llm, others, "second")
    assert first != second
    for name, wanted in (("first", rows), ("second", others)):
        llm.reset()
        engine = LlamaCpp(llm)
        assert kvsnap.Session(store, engine, name).resume(IDS, leave=0).reused_tokens == len(IDS)
        np.testing.assert_array_equal(engine.export(0, 150)["full.k"][2], wanted.k[2])


def test_what_another_models_weights_compute_is_exact_again(
    store: kvsnap.Store, load: Load
) -> None:
    llm, other = load(), load(seed=2)
    take(store, llm, own_rows(llm), "s")
    engine = LlamaCpp(other)
    session = kvsnap.Session(store, engine, "s")
    assert session.resume(IDS).reused_tokens == 0
    engine.evaluate(IDS)
    assert session.save().fidelity == "exact"


def test_nobody_compresses_by_what_marks_unverified_rows(store: kvsnap.Store, load: Load) -> None:
    engine = LlamaCpp(load())
    with pytest.raises(Unsupported, match="cannot be chosen"):
        kvsnap.Session(store, engine, "s", codec="unverified")


def test_sliding_windows_that_are_kept_whole_are_a_memory_of_their_own(load: Load) -> None:
    """llama.cpp writes two memories of such a model, and other tools its layers as they take turns."""
    engine = LlamaCpp(load("gemma3", swa_full=True))
    assert not engine.layout.needs_state
    with pytest.raises(Unsupported, match="one memory"):
        Target(engine.identity(64, lambda path: "blake3:00"))
