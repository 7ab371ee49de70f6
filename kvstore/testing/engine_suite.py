"""The contract of engines/base.py as tests. An adapter's test file subclasses it:

    class TestMyEngine(EngineSuite):
        def make(self) -> Engine:
            return MyEngine(...)        # a new, empty context, each time of the same model

It assumes nothing of an engine but the contract. Engines of one `make` are compared with each
other bit for bit only where they evaluate the same tokens in the same batches.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvsnap.engines.base import Engine
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Identity
from kvsnap.formats.layout import Array, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.testing.turns import some_ids

LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 48, 49)
"""Around the edges of blocks of 16, where off-by-ones have been found in other stores."""


class EngineSuite:
    """Subclass it and give `make`; the other methods let more be checked where they are given."""

    vocabulary = 500
    """Ids below this are evaluated; every one must be a token that the engine can take."""

    def make(self) -> Engine:
        raise NotImplementedError("give the suite an engine: def make(self) -> Engine")

    def make_other_batch(self) -> Engine:
        """The same model in a context with another batch size."""
        pytest.skip("make_other_batch is not given")

    def make_other_weights(self) -> Engine:
        """An engine with other weights of the same shapes."""
        pytest.skip("make_other_weights is not given")

    def identity_of(self, engine: Engine) -> Identity:
        return engine.identity(16, _file_digest)

    def ids(self, count: int, seed: int = 1) -> TokenIds:
        return some_ids(count, seed, self.vocabulary)

    def test_a_new_engine_holds_nothing(self) -> None:
        engine = self.make()
        assert len(engine.token_ids()) == 0
        assert engine.evaluated == 0

    def test_evaluate_counts_and_reports_each_batch(self) -> None:
        engine, steps = self.make(), list[int]()
        engine.evaluate(self.ids(33), steps.append)
        assert engine.evaluated == 33
        assert sum(steps) == 33
        assert min(steps) > 0
        assert engine.token_ids().tolist() == self.ids(33).tolist()

    @pytest.mark.parametrize("length", LENGTHS)
    def test_rows_come_back_bit_for_bit(self, length: int) -> None:
        before = _evaluated(self.make(), self.ids(length))
        after = self.make()
        _load(after, _export(before, length), self.ids(length))
        assert after.token_ids().tolist() == self.ids(length).tolist()
        assert after.evaluated == 0
        _assert_equal(_export(after, length), _export(before, length))

    @pytest.mark.parametrize("length", LENGTHS[1:])
    def test_exports_fit_the_layout(self, length: int) -> None:
        engine = _evaluated(self.make(), self.ids(length))
        engine.layout.check(engine.export(0, length), length)

    def test_a_range_is_that_part_of_the_whole(self) -> None:
        engine = _evaluated(self.make(), self.ids(49))
        whole = engine.export(0, 49)
        for start, stop in ((0, 1), (0, 16), (7, 8), (15, 17), (16, 32), (33, 49), (48, 49)):
            part = {name: array[:, start:stop] for name, array in whole.items()}
            _assert_equal(engine.export(start, stop), part)

    def test_export_does_not_disturb_the_engine(self) -> None:
        left_alone, exported = self.make(), self.make()
        for engine in (left_alone, exported):
            engine.evaluate(self.ids(20))
        exported.export(0, 20)
        exported.export(3, 17)
        assert exported.token_ids().tolist() == self.ids(20).tolist()
        for engine in (left_alone, exported):
            engine.evaluate(self.ids(9, seed=2))
        assert exported.evaluated == 29
        _assert_equal(exported.export(0, 29), left_alone.export(0, 29))

    def test_exported_arrays_stay_as_they_are_when_the_engine_goes_on(self) -> None:
        engine = _evaluated(self.make(), self.ids(20))
        exported = engine.export(0, 20)
        copies = {name: array.copy() for name, array in exported.items()}
        engine.evaluate(self.ids(9, seed=2))
        engine.truncate(5)
        engine.evaluate(self.ids(20, seed=3))
        _assert_equal(exported, copies)

    def test_load_replaces_all_that_was_held(self) -> None:
        rows = _evaluated(self.make(), self.ids(17)).export(0, 17)
        engine = _evaluated(self.make(), self.ids(40, seed=2))
        _load(engine, rows, self.ids(17))
        assert engine.token_ids().tolist() == self.ids(17).tolist()
        _assert_equal(engine.export(0, 17), rows)
        with pytest.raises(KvsnapError):
            engine.export(0, 18)

    def test_loading_nothing_empties_the_engine(self) -> None:
        engine = _evaluated(self.make(), self.ids(20))
        engine.load(engine.landing(0), self.ids(0))
        assert len(engine.token_ids()) == 0

    def test_a_landing_made_for_more_tokens_takes_fewer(self) -> None:
        """Damage shortens a prefix after the landing was made."""
        rows = _evaluated(self.make(), self.ids(48)).export(0, 48)
        engine = self.make()
        landing = engine.landing(48)
        for name, array in landing.rows.items():
            array[...] = rows[name]
        engine.load(landing, self.ids(48)[:17])
        assert engine.token_ids().tolist() == self.ids(48)[:17].tolist()
        front = {name: array[:, :17] for name, array in rows.items()}
        _assert_equal(engine.export(0, 17), front)

    @pytest.mark.parametrize(("start", "stop", "filled"), [(7, 33, 33), (16, 48, 40), (20, 20, 20)])
    def test_only_missing_rows_are_loaded(self, start: int, stop: int, filled: int) -> None:
        """What the engine holds up to the landing's start stays bit for bit."""
        source, engine = _evaluated(self.make(), self.ids(48)), self.make()
        engine.evaluate(self.ids(start))
        engine.evaluate(self.ids(3, seed=9))  # and then something else
        before = {name: array.copy() for name, array in engine.export(0, start).items()}
        landing = engine.landing(stop, start)
        for name, array in (source.export(start, stop) if stop > start else {}).items():
            landing.rows[name][...] = array
        engine.load(landing, self.ids(48)[:filled])
        assert engine.token_ids().tolist() == self.ids(48)[:filled].tolist()
        _assert_equal(engine.export(0, start), before)
        if filled > start:
            _assert_equal(engine.export(start, filled), source.export(start, filled))
        engine.evaluate(self.ids(5, seed=3))
        assert len(engine.token_ids()) == filled + 5

    def test_a_landing_does_not_touch_the_engine(self) -> None:
        engine = _evaluated(self.make(), self.ids(20))
        rows = {name: array.copy() for name, array in engine.export(0, 20).items()}
        for array in engine.landing(33).rows.values():
            array[...] = 0
        assert engine.token_ids().tolist() == self.ids(20).tolist()
        _assert_equal(engine.export(0, 20), rows)

    def test_a_loaded_engine_goes_on_like_one_that_was_never_interrupted(self) -> None:
        through = _evaluated(self.make(), self.ids(33))
        rows = through.export(0, 33)
        resumed = self.make()
        _load(resumed, rows, self.ids(33))
        for engine in (through, resumed):
            engine.evaluate(self.ids(17, seed=2))
        assert resumed.evaluated == 17
        _assert_equal(resumed.export(0, 50), through.export(0, 50))

    @pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 32])
    def test_truncate_forgets_the_end_and_keeps_the_front(self, kept: int) -> None:
        engine = _evaluated(self.make(), self.ids(33))
        front = _export(engine, kept)
        engine.truncate(kept)
        assert engine.token_ids().tolist() == self.ids(33)[:kept].tolist()
        _assert_equal(_export(engine, kept), front)
        with pytest.raises(KvsnapError):
            engine.export(0, kept + 1)

    @pytest.mark.parametrize("kept", [33, 34, 1000])
    def test_truncating_to_what_is_held_or_more_changes_nothing(self, kept: int) -> None:
        engine = _evaluated(self.make(), self.ids(33))
        rows = engine.export(0, 33)
        engine.truncate(kept)
        assert engine.token_ids().tolist() == self.ids(33).tolist()
        _assert_equal(engine.export(0, 33), rows)

    def test_an_engine_goes_on_after_truncation(self) -> None:
        engine = _evaluated(self.make(), self.ids(33))
        engine.truncate(17)
        engine.evaluate(self.ids(16, seed=2))
        assert engine.token_ids().tolist() == [*self.ids(33)[:17], *self.ids(16, seed=2)]
        engine.layout.check(engine.export(0, 33), 33)

    @pytest.mark.parametrize(("start", "stop"), [(0, 34), (33, 34), (40, 41), (-1, 5), (20, 10)])
    def test_positions_that_are_not_held_are_refused(self, start: int, stop: int) -> None:
        engine = _evaluated(self.make(), self.ids(33))
        with pytest.raises(KvsnapError):
            engine.export(start, stop)
        assert engine.token_ids().tolist() == self.ids(33).tolist()

    def test_token_ids_are_a_copy(self) -> None:
        engine = _evaluated(self.make(), self.ids(17))
        given = engine.token_ids()
        given[...] = 0
        assert engine.token_ids().tolist() == self.ids(17).tolist()

    def test_more_tokens_than_fit_are_refused_and_nothing_is_computed(self) -> None:
        engine = _evaluated(self.make(), self.ids(17))
        too_many = self.ids(engine.capacity - 17 + 1, seed=2)
        with pytest.raises(KvsnapError):
            engine.evaluate(too_many)
        assert engine.evaluated == 17
        assert engine.token_ids().tolist() == self.ids(17).tolist()

    def test_the_identity_is_the_same_at_every_call(self) -> None:
        engine = self.make()
        first = self.identity_of(engine).canonical()
        engine.evaluate(self.ids(17))
        assert self.identity_of(engine).canonical() == first
        assert self.identity_of(self.make()).canonical() == first

    def test_the_identity_carries_block_size_and_layout(self) -> None:
        engine = self.make()
        assert self.identity_of(engine).block_size == 16
        assert engine.identity(64, _file_digest).block_size == 64
        assert self.identity_of(engine).layout == engine.layout

    def test_the_identity_does_not_depend_on_the_batch_size(self) -> None:
        other = self.make_other_batch()
        assert self.identity_of(other).canonical() == self.identity_of(self.make()).canonical()

    def test_the_identity_depends_on_the_weights(self) -> None:
        other = self.identity_of(self.make_other_weights())
        here = self.identity_of(self.make())
        assert other.canonical() != here.canonical()
        assert other.weights != here.weights


def _evaluated(engine: Engine, ids: TokenIds) -> Engine:
    if len(ids):
        engine.evaluate(ids)
    return engine


def _export(engine: Engine, tokens: int) -> Rows:
    """Rows [0, tokens); an empty range need not be exportable."""
    if tokens:
        return engine.export(0, tokens)
    return engine.layout.empty(0)


def _load(engine: Engine, rows: Rows, ids: TokenIds) -> None:
    landing = engine.landing(len(ids))
    for name, array in landing.rows.items():
        array[...] = rows[name]
    engine.load(landing, ids)


def _assert_equal(found: Rows, wanted: Rows) -> None:
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        assert _bytes(array) == _bytes(wanted[name]), f"the rows of {name} differ"


def _bytes(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@functools.cache
def _file_digest(path: Path) -> str:
    hasher = blake3()
    hasher.update_mmap(path)
    return f"blake3:{hasher.hexdigest()}"
