"""The contract of engines/base.py for engines whose layout needs a state, as tests.

    class TestMyEngine(StateEngineSuite):
        def make(self) -> Engine:
            return MyEngine(...)        # a new, empty context, each time of the same model

Such an engine cannot be cut at any position: the rest of the contract is in engine_suite.py, whose
tests about cutting do not hold here.
"""

from __future__ import annotations

import numpy as np
import pytest

import kvsnap
from kvsnap.engines.base import Engine
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds
from kvsnap.testing.turns import some_ids

LENGTHS = (1, 15, 16, 17, 32, 63, 64, 65, 128, 150)
"""Around the edges of blocks of 64 and of windows of 16 and 32."""


class StateEngineSuite:
    """Subclass it and give `make`."""

    vocabulary = 500
    """Ids below this are evaluated; every one must be a token that the engine can take."""

    def make(self) -> Engine:
        raise NotImplementedError("give the suite an engine: def make(self) -> Engine")

    def ids(self, count: int, seed: int = 1) -> TokenIds:
        return some_ids(count, seed, self.vocabulary)

    def evaluated(self, count: int) -> Engine:
        engine = self.make()
        engine.evaluate(self.ids(count))
        return engine

    def test_the_layout_says_that_blocks_are_not_enough(self) -> None:
        assert self.make().layout.needs_state

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_state_has_the_rows_that_the_layout_says(self, length: int) -> None:
        engine = self.evaluated(length)
        layout = engine.layout
        rows = {**engine.export(0, length), **engine.export_state()}
        layout.check(rows, layout.ranges_at(0, length))

    @pytest.mark.parametrize("length", LENGTHS)
    def test_state_and_rows_come_back_bit_for_bit(self, length: int) -> None:
        before, after = self.evaluated(length), self.make()
        _load(after, before.export(0, length), before.export_state(), self.ids(length))
        assert after.token_ids().tolist() == self.ids(length).tolist()
        assert after.evaluated == 0
        _assert_equal(after.export(0, length), before.export(0, length))
        _assert_equal(after.export_state(), before.export_state())

    @pytest.mark.parametrize("held", [16, 40])
    def test_an_engine_that_holds_the_front_takes_the_rest(self, held: int) -> None:
        source, engine = self.evaluated(100), self.evaluated(held)
        rows = source.export(held, 100) if source.layout.in_blocks.groups else {}
        _load(engine, rows, source.export_state(), self.ids(100), start=held)
        assert engine.token_ids().tolist() == self.ids(100).tolist()
        _assert_equal(engine.export(held, 100), source.export(held, 100))
        _assert_equal(engine.export_state(), source.export_state())

    def test_a_loaded_engine_goes_on_like_one_that_was_never_interrupted(self) -> None:
        through = self.evaluated(100)
        resumed = self.make()
        _load(resumed, through.export(0, 100), through.export_state(), self.ids(100))
        for engine in (through, resumed):
            engine.evaluate(self.ids(40, seed=2))
        assert resumed.evaluated == 40
        _assert_equal(resumed.export(100, 140), through.export(100, 140))
        _assert_equal(resumed.export_state(), through.export_state())

    def test_a_state_stays_as_it_was_whatever_the_engine_does(self) -> None:
        engine = self.evaluated(50)
        state = engine.export_state()
        kept = {name: array.copy() for name, array in state.items()}
        engine.evaluate(self.ids(30, seed=2))
        _assert_equal(state, kept)

    @pytest.mark.parametrize("tokens", [0, 1, 16, 60, 79, 80])
    def test_truncate_goes_back_to_where_reach_says(self, tokens: int) -> None:
        engine = self.evaluated(80)
        reached = engine.reach(tokens)
        assert reached in (0, tokens)
        assert engine.reach(80) == 80
        engine.truncate(reached)
        assert engine.token_ids().tolist() == self.ids(80)[:reached].tolist()
        engine.evaluate(self.ids(80)[reached:])
        assert engine.token_ids().tolist() == self.ids(80).tolist()

    def test_a_state_cannot_make_fewer_tokens(self) -> None:
        source, engine = self.evaluated(50), self.make()
        landing = engine.landing(50)
        for name, array in {**source.export(0, 50), **source.export_state()}.items():
            landing.rows[name][...] = array
        with pytest.raises(KvsnapError):
            engine.load(landing, self.ids(40))

    @pytest.mark.parametrize("length", LENGTHS)
    def test_a_session_goes_on_from_its_end(
        self, length: int, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with kvsnap.Store(tmp_path_factory.mktemp("store")) as store:
            kvsnap.Session(store, self.evaluated(length), "s").save()
            engine = self.make()
            ids = np.concatenate([self.ids(length), self.ids(7, seed=3)])
            report = kvsnap.Session(store, engine, "s").resume(ids)
            assert (report.reused_tokens, report.damage) == (length, ())
            engine.evaluate(ids[length:])
            assert engine.evaluated == 7

    def test_another_conversation_goes_on_from_a_checkpoint_that_both_share(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with kvsnap.Store(tmp_path_factory.mktemp("store")) as store:
            first = self.make()
            session = kvsnap.Session(store, first, "first")
            ids = self.ids(200)
            session.resume(ids)
            for start, stop in ((0, 70), (70, 130), (130, 200)):
                first.evaluate(ids[start:stop])
                session.checkpoint()
            session.save()
            other = np.concatenate([ids[:100], self.ids(60, seed=4)])
            engine = self.make()
            report = kvsnap.Session(store, engine, "other").resume(other)
            assert report.reused_tokens == 70
            engine.evaluate(other[70:])
            assert engine.evaluated == 90


def _load(engine: Engine, rows: Rows, state: Rows, ids: TokenIds, start: int = 0) -> None:
    landing = engine.landing(len(ids), start)
    for name, array in {**rows, **state}.items():
        landing.rows[name][...] = array
    engine.load(landing, ids)


def _assert_equal(found: Rows, wanted: Rows) -> None:
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        same = np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(wanted[name]).tobytes()
        assert same, f"the rows of {name} differ"
