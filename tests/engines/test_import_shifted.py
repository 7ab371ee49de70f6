"""Rows that llama.cpp moved over tokens which are gone: context shift, --cache-reuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.foreign import GGUF, ForeignRows
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.interchange.checking import BETWEEN
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.interchange.importing import ImportReport, import_rows
from kvsnap.testing.tiny_gguf import write_tiny
from tests.engines.shifting import shift

pytestmark = pytest.mark.engine
BLOCK, TOKENS = 64, 64 * 20
IDS = token_array([1, *np.random.default_rng(3).integers(5, 250, 2 * TOKENS)])


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[llama_cpp.Llama]:
    made = llama_cpp.Llama(
        str(write_tiny(tmp_path / "m.gguf", "llama")), n_ctx=4096, n_threads=1, verbose=False
    )
    yield made
    made.close()


def take(llm: llama_cpp.Llama, ids: TokenIds, path: Path, **more: Any) -> ImportReport:
    """What the engine holds of these ids, as a file would have it."""
    engine = LlamaCpp(llm)
    with kvsnap.Store(path / "store") as store:
        target = Target(engine.identity(BLOCK, store.file_digest))
        rows: ForeignRows = target.give(engine.export(0, len(ids)), ids, GGUF)
        llm.reset()
        return import_rows(kvsnap.Session(store, LlamaCpp(llm), "s"), rows, ids, **more)


def shifted(llm: llama_cpp.Llama, keep: int, gone: int, before: int) -> TokenIds:
    """The ids that a shifted context holds in the end."""
    after = IDS[before : before + TOKENS - (before - gone)]
    return shift(llm, IDS, keep, gone, before, after).token_ids()


def test_a_long_file_is_computed_in_nine_blocks(llm: llama_cpp.Llama, tmp_path: Path) -> None:
    LlamaCpp(llm).evaluate(IDS[:TOKENS])
    report = take(llm, IDS[:TOKENS], tmp_path)
    assert report.verified
    ends = 2 * (BLOCK + 16 + BLOCK - 16)
    each_id = len(set(IDS[:TOKENS].tolist())) + 16
    assert report.computed_tokens == ends + BETWEEN * BLOCK + each_id


@pytest.mark.parametrize(
    ("keep", "gone", "before"),
    [(64, 400, 1000), (64, 64, 700), (128, 1, 700), (600, 5, 1000)],
    ids=["half of the context", "one block", "one token", "the middle"],
)
def test_what_was_shifted_is_refused(
    llm: llama_cpp.Llama, tmp_path: Path, keep: int, gone: int, before: int
) -> None:
    ids = shifted(llm, keep, gone, before)
    assert len(ids) == TOKENS
    with pytest.raises(Damaged, match="not what this model computes"):
        take(llm, ids, tmp_path)


def test_a_short_stretch_may_lie_between_what_is_computed_and_all_of_it_is_seen_on_demand(
    llm: llama_cpp.Llama, tmp_path: Path
) -> None:
    """The limit of the check, as design/0014 says it."""
    engine = LlamaCpp(llm)
    engine.evaluate(IDS[:TOKENS])
    landing = engine.landing(TOKENS)
    for name, rows in engine.export(0, TOKENS).items():
        landing.rows[name][...] = rows
        landing.rows[name][1:, 2 * BLOCK + 10 : 2 * BLOCK + 20] = 0  # V of layer 0 is right
    engine.truncate(0)
    engine.load(landing, IDS[:TOKENS])
    with pytest.raises(Damaged, match="not what this model computes"):
        take(llm, IDS[:TOKENS], tmp_path, whole=True)
