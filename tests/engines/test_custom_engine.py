"""The sample of an adapter for an engine of one's own keeps the contract."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvsnap
from kvsnap.engines.base import Engine
from kvsnap.samples.custom_engine import NumpyEngine, NumpyModel
from kvsnap.testing.engine_suite import EngineSuite
from kvsnap.testing.turns import some_ids


class TestTheSample(EngineSuite):
    def make(self) -> Engine:
        return NumpyEngine(NumpyModel())

    def make_other_batch(self) -> Engine:
        return NumpyEngine(NumpyModel(), capacity=512)

    def make_other_weights(self) -> Engine:
        return NumpyEngine(NumpyModel(seed=1))


def test_a_resumed_sample_says_the_same_token(tmp_path: Path) -> None:
    ids = some_ids(200, 1, 500)
    first, second = NumpyEngine(NumpyModel()), NumpyEngine(NumpyModel())
    with kvsnap.Store(tmp_path) as store:
        first.evaluate(ids)
        kvsnap.Session(store, first, "s").save()
        report = kvsnap.Session(store, second, "s").resume(ids)
    assert report.reused_tokens == 199
    second.evaluate(ids[199:])
    assert second.evaluated == 1
    assert np.array_equal(first.logits, second.logits)
