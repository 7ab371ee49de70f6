"""What `kvsnap bench codecs` counts: bytes of whole files, KL in the right direction, signs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import UsageError
from kvsnap.formats.layout import Group, Layout, Plane, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.measure.bench_codecs import bench_codecs
from kvsnap.kvstore.measure.codec_loss import (
    divergence,
    measure_loss,
    passage,
    through_files,
)
from kvsnap.testing.turns import some_ids

PLANE = Plane(name="v", kind="elements", dtype="F16", row=(2, 16))
LAYOUT = Layout(groups=(Group(name="all", layers=3, planes=(PLANE,)),))
VOCABULARY = 50


class LinearModel:
    """Distributions that follow from the mean of all rows: every element counts."""

    layout = LAYOUT

    def __init__(self) -> None:
        self.weights = np.random.default_rng(1).standard_normal((3 * 32, VOCABULARY))

    def rows(self, token_ids: TokenIds) -> Rows:
        source = np.random.default_rng(int(token_ids.sum()))
        values = source.standard_normal((3, len(token_ids), 32))
        return {"all.v": values.astype("<f2").view("<u2")}

    def log_probs(self, context: TokenIds, rows: Rows, token_ids: TokenIds) -> np.ndarray:
        mean = np.ascontiguousarray(rows["all.v"]).view("<f2").astype(np.float64).mean(axis=1)
        logits = 300 * mean.reshape(-1) @ self.weights + token_ids[:, None] % 7
        found: np.ndarray = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found.astype(np.float32)


def test_a_lossless_codec_loses_nothing() -> None:
    model = LinearModel()
    loss = measure_loss(
        model, get_codec("zstd"), [passage(model, "a", some_ids(300, 1, 50), 200)], 64
    )
    assert (loss.kl_mean, loss.kl_p99, loss.top1, loss.ppl_change) == (0, 0, 1, 0)


def test_kl_and_perplexity_are_those_of_the_restored_rows() -> None:
    model, ids = LinearModel(), some_ids(300, 1, 50)
    text = passage(model, "a", ids, 200)
    loss = measure_loss(model, get_codec("q4;step=2"), [text], 64)
    rows, _ = through_files(get_codec("q4;step=2"), LAYOUT, ids[:200], text.rows, 64)
    exact, found = (
        np.asarray(model.log_probs(ids[:200], r, ids[200:]), np.float64) for r in (text.rows, rows)
    )
    assert loss.kl_mean == pytest.approx((np.exp(exact) * (exact - found)).sum(-1).mean(), rel=1e-4)
    assert loss.kl_mean > 1e-3
    actual = (np.arange(99), ids[201:])
    change = math.exp((exact[actual] - found[actual]).mean()) - 1
    assert loss.ppl_change == pytest.approx(change, abs=1e-6)


def test_bytes_are_those_of_whole_files_and_the_tail_is_left_alone() -> None:
    ids = some_ids(200)
    rows = LinearModel().rows(ids)
    restored, size = through_files(get_codec("q8"), LAYOUT, ids, rows, 64)
    assert np.array_equal(restored["all.v"][:, 192:], rows["all.v"][:, 192:])
    assert np.array_equal(restored["all.v"][:, :4], rows["all.v"][:, :4])
    assert not np.array_equal(restored["all.v"][:, 4:192], rows["all.v"][:, 4:192])
    raw = 3 * 192 * 32 * 2
    assert raw / 2 < size < raw
    assert through_files(get_codec("raw"), LAYOUT, ids, rows, 64)[1] > raw


def test_divergence_has_a_direction() -> None:
    one, two = np.log(np.array([[0.5, 0.5]])), np.log(np.array([[0.9, 0.1]]))
    forwards = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(one, two)[0] == pytest.approx(forwards)
    assert divergence(one, two)[0] != pytest.approx(divergence(two, one)[0], rel=0.1)
    assert divergence(one, one)[0] == 0


def test_short_texts_are_left_out_with_the_reason() -> None:
    texts = {"long": some_ids(300, 1, 50), "short": some_ids(100, 2, 50)}
    codecs = [get_codec("raw"), get_codec("q8")]
    found = bench_codecs(LinearModel(), codecs, texts, context=200, held_out=50)
    assert found.texts == ("long",)
    assert "242 are needed" in found.skipped["short"]
    assert [result.codec for result in found.results] == ["raw", "q8@1"]
    assert all(result.speed.decode > 0 for result in found.results)
    with pytest.raises(UsageError, match="no text has"):
        bench_codecs(LinearModel(), codecs, {"short": some_ids(100)}, context=200, held_out=50)
