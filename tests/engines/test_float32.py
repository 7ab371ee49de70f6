"""The float32 engine that codecs are measured in: its rows are llama.cpp's, its sums are right."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvsnap.engines import LlamaCpp
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.kvstore.measure.codec_loss import divergence
from kvsnap.kvstore.measure.float32 import Float32Model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]
TEXT = "The old bridge over the river was closed for a week, and nobody knew why. " * 6


@pytest.fixture(scope="module")
def float32(model: Path) -> Float32Model:
    return Float32Model(model)


def values(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view("<f2").astype(np.float32)


def test_layout_and_rows_are_those_of_llama_cpp(float32: Float32Model, model: Path) -> None:
    # A calibration that is made here must fit there: same planes, same order of the elements.
    llm = load_llama(model, LoadOptions(), 256)
    try:
        engine = LlamaCpp(llm)
        assert float32.layout == engine.layout
        ids = engine.tokenize(TEXT, first=True)
        assert float32.tokenize(TEXT).tolist() == ids.tolist()
        engine.evaluate(ids)
        theirs = engine.export(0, len(ids))
    finally:
        llm.close()
    for name, ours in float32.rows(ids).items():
        one, two = values(ours)[0, 4:], values(theirs[name])[0, 4:]
        assert np.corrcoef(one.reshape(-1), two.reshape(-1))[0, 1] > 0.999
        if name == "full.k":  # the other pairing is no small difference
            heads = one.reshape(-1, 3, 32, 2).swapaxes(-1, -2).reshape(one.shape)
            assert np.corrcoef(heads.reshape(-1), two.reshape(-1))[0, 1] < 0.9


def test_distributions_on_restored_rows_are_those_of_one_run(float32: Float32Model) -> None:
    ids = float32.tokenize(TEXT)
    rows = float32.rows(ids[:64])
    split = np.asarray(float32.log_probs(ids[:64], rows, ids[64:]))
    nothing = {name: array[:, :0] for name, array in rows.items()}
    whole = np.asarray(float32.log_probs(ids[:0], nothing, ids))[64:]
    assert divergence(whole, split).mean() < 1e-5
    again = np.asarray(float32.log_probs(ids[:64], rows, ids[64:]))
    assert np.array_equal(split, again)


def test_outlier_channels_leave_the_function_as_it_was(model: Path, float32: Float32Model) -> None:
    ids = float32.tokenize(TEXT)
    scaled = Float32Model(model)
    scaled.scale_keys()
    before, after = float32.rows(ids[:64]), scaled.rows(ids[:64])
    assert np.abs(values(before["full.v"]) - values(after["full.v"])).max() < 0.05
    grown = np.abs(values(after["full.k"])).max() / np.abs(values(before["full.k"])).max()
    assert grown > 5
    one = np.asarray(float32.log_probs(ids[:64], before, ids[64:]))
    two = np.asarray(scaled.log_probs(ids[:64], after, ids[64:]))
    assert divergence(one, two).mean() < 1e-5


def test_gradients_foretell_the_loss_of_a_small_error(float32: Float32Model) -> None:
    # The mean square of the gradient is the Fisher information: KL of an error e is e² F / 2.
    ids = float32.tokenize(TEXT)
    rows = float32.rows(ids)
    drawn = [float32.gradients(ids, seed)[1]["full.v"] for seed in range(6)]
    energy = np.mean([np.square(g[8:40]).sum() for g in drawn])
    noise = np.random.default_rng(1).standard_normal(rows["full.v"].shape).astype(np.float32)
    size = 0.03
    moved = values(rows["full.v"])
    moved[:, 8:40] += size * noise[:, 8:40]
    changed = {**rows, "full.v": moved.astype("<f2").view("<u2")}
    # Only what the rows do to later tokens can be measured by restoring them.
    cut = {name: array[:, :40] for name, array in rows.items()}
    exact = np.asarray(float32.log_probs(ids[:40], cut, ids[40:]))
    cut = {name: array[:, :40] for name, array in changed.items()}
    found = np.asarray(float32.log_probs(ids[:40], cut, ids[40:]))
    measured, foretold = divergence(exact, found).sum(), size**2 * energy / 2
    assert 0.05 < measured / foretold < 5


def test_texts_that_the_model_writes_are_the_same_every_time(float32: Float32Model) -> None:
    one = float32.write(("The", "def"), 3, 12, seed=1)
    two = float32.write(("The", "def"), 3, 12, seed=1)
    assert [ids.tolist() for ids in one] == [ids.tolist() for ids in two]
    assert {len(ids) for ids in one} == {12}
    assert one[0].tolist() != one[2].tolist()
