"""Rows that transformers computes, taken over into llama.cpp's sessions and back, by their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvsnap
from kvsnap.engines import LlamaCpp
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange import get_format
from kvsnap.formats.interchange.foreign import HALVES, ForeignRows
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.interchange.importing import import_rows, token_ids_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
TEXT = "The old bridge over the river was closed for a week, and nobody knew why. " * 10


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[Any]:
    made = load_llama(model, LoadOptions(cache_type_k="f32", cache_type_v="f32"), 512)
    yield made
    made.close()


@pytest.fixture(scope="module")
def computed(model: Path, llm: Any) -> ForeignRows:
    """By transformers itself, on the weights of the same GGUF file: its own cache object's tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = LlamaCpp(llm).tokenize(TEXT, first=True)
    own = AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=torch.float32
    )
    with torch.no_grad():
        cache = own(torch.tensor(ids.astype(np.int64))[None], use_cache=True).past_key_values

    def rows(tensors: Any) -> tuple[Any, ...]:
        return tuple(
            np.ascontiguousarray(t[0].transpose(0, 1).reshape(len(ids), -1).numpy()).view("<u4")
            for t in tensors
        )

    return ForeignRows(
        k=rows(layer.keys for layer in cache.layers),
        v=rows(layer.values for layer in cache.layers),
        k_type="f32",
        v_type="f32",
        order=HALVES,
        heads=3,
        head_dim=64,
        token_ids=ids,
    )


@pytest.mark.parametrize("name", ["transformers", "safetensors", "mlx-lm", "mlx-lm-0.31"])
def test_a_cache_of_transformers_is_verified_by_llama_cpp_and_comes_out_as_it_went_in(
    llm: Any, computed: ForeignRows, tmp_path: Path, name: str
) -> None:
    own, engine = get_format(name), LlamaCpp(llm)
    llm.reset()
    with kvsnap.Store(tmp_path) as store:
        target = Target(engine.identity(64, store.file_digest))
        assert own.write is not None
        written = own.write(computed, target.given(token_ids=computed.token_ids))
        files = {path: memoryview(data) for path, data in written.items()}
        read = own.read(files, target.given(token_ids=computed.token_ids))
        session = kvsnap.Session(store, engine, "s")
        ids = token_ids_of(read, computed.token_ids)
        report = import_rows(session, read, ids)
        assert report.verified
        assert report.saved.fidelity == "exact"
        back = target.give(engine.export(0, len(ids)), ids, HALVES)
        for one, other in zip((*back.k, *back.v), (*computed.k, *computed.v), strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_wrong_order_of_k_is_refused_not_loaded(
    llm: Any, computed: ForeignRows, tmp_path: Path
) -> None:
    llm.reset()
    called_ggufs = dataclasses.replace(computed, order="gguf")
    assert computed.token_ids is not None
    with kvsnap.Store(tmp_path) as store:
        session = kvsnap.Session(store, LlamaCpp(llm), "s")
        with pytest.raises(Damaged):
            import_rows(session, called_ggufs, computed.token_ids)
