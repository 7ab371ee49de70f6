"""`--max-kl`: the smallest codec that holds, the engine afterwards as it was, never a guess."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import EXACT
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.max_kl import Choice, candidates_of, choose_codec, nudged
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
CANDIDATES = [get_codec("q8"), get_codec("q4"), get_codec("q4;step=1.0")]


class TalkingEngine(StampedEngine):
    """Distributions that follow from all rows held: a change of any of them shows."""

    def log_probs(self, token_ids: TokenIds) -> np.ndarray:
        found = []
        for token in token_ids:
            self.evaluate(np.array([token], np.uint32))
            rows = self.export(0, self.held)["all.v"]
            mean = rows.view("<f2").astype(np.float64).mean(axis=(0, 1)) / 50
            logits = np.concatenate([mean, -mean])
            found.append(logits - np.log(np.exp(logits).sum()))
        return np.array(found, np.float32)


def choose(engine: TalkingEngine, limit: float) -> Choice:
    return choose_codec(engine, CANDIDATES, limit, 16)  # type: ignore[arg-type]


def held(count: int) -> TalkingEngine:
    engine = TalkingEngine()
    engine.evaluate(some_ids(count))
    return engine


def test_the_smallest_that_holds_is_taken() -> None:
    engine = held(200)
    choice = choose(engine, 1e9)
    sizes = [tried.bytes for tried in choice.tried]
    assert choice.codec == CANDIDATES[sizes.index(min(sizes))]
    excesses = sorted(tried.excess for tried in choice.tried)
    assert excesses[0] < excesses[1]
    best = min(choice.tried, key=lambda tried: tried.excess)
    strict = choose(held(200), best.excess + best.error)
    assert strict.codec is not None
    assert strict.codec.fidelity == best.codec
    # The limit holds with the error that so few tokens leave, not on average only.
    assert choose(held(200), best.excess + 0.9 * best.error).codec is None
    assert choose(held(200), 0.0).codec is None


def test_where_none_holds_the_session_stays_exact() -> None:
    choice = choose(held(200), -1.0)
    assert (choice.codec, choice.excess) == (None, 0.0)
    assert choice.notes()["codec"] == "exact"
    assert len(choice.notes()["tried"]) == 3


@pytest.mark.parametrize("count", [0, 1, 16, 40, 63])
def test_a_short_session_is_not_guessed_at(count: int) -> None:
    assert choose(held(count), 1e9).codec is None


def test_the_engine_holds_the_same_afterwards() -> None:
    engine = held(200)
    choose(engine, 1e9)
    assert engine.token_ids().tolist() == some_ids(200).tolist()
    engine.check_rows()
    assert engine.held_fidelity() == EXACT


def test_lossy_rows_are_no_measure(open_store: Opener) -> None:
    turn(open_store(), StampedEngine(), some_ids(200), codec="q8")
    engine = TalkingEngine()
    turn(open_store(), engine, some_ids(200), codec="q8", save=False)
    with pytest.raises(UsageError, match="exact rows"):
        choose(engine, 1.0)


def test_rows_that_the_engine_quantized_itself_stay_as_they_are() -> None:
    engine = TalkingEngine(element="rows")
    engine.evaluate(some_ids(200))
    engine.log_probs = lambda ids: np.zeros((len(ids), 4), np.float32)  # type: ignore[method-assign]
    choice = choose(engine, 1e9)
    assert (choice.codec, choice.tried) == (None, ())


def test_calibrated_codecs_are_no_candidates_without_a_calibration(open_store: Opener) -> None:
    found = candidates_of(Session(open_store(), StampedEngine()))
    assert {codec.id for codec in found} == {"q8", "q4"}


def test_the_floor_is_that_of_rows_rounded_to_bfloat16() -> None:
    engine = StampedEngine(element="F32")
    values = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-9, -3.14159], np.float32)
    rows = {name: np.resize(values.view(np.uint32), (2, 4, 16)) for name in ("all.k", "all.v")}
    found = nudged(engine.layout, rows)["all.k"].view(np.float32)[0, 0, :4]
    assert found.tolist() == [1.0, 1.0, 1 + 2.0**-7, -3.140625]


def test_rows_of_every_type_are_nudged_and_stay_finite() -> None:
    largest = {"F16": 0x7BFF, "BF16": 0x7F7F, "F32": 0x7F7FFFFF}
    for element, bits in largest.items():
        engine = StampedEngine(element=element)
        kind = engine.layout.planes()["all.k"][1].memory_dtype
        some = np.array([bits, 0x3C01, 0x3C03, 0x4001], kind)
        rows = {name: np.resize(some, (2, 4, 16)) for name in ("all.k", "all.v")}
        found = nudged(engine.layout, rows)["all.k"]
        assert not np.array_equal(found, rows["all.k"])
        assert found.dtype == kind
        top = int(found[0, 0, 0]) & (2 ** (8 * kind.itemsize - 1) - 1)
        assert top <= bits + (0x10000 if element == "F32" else 0)


def test_a_candidate_that_cannot_code_these_rows_is_not_chosen_for_another() -> None:
    candidates = [get_codec("kvtc"), get_codec("q4"), get_codec("q8")]  # no calibration here
    choice = choose_codec(held(200), candidates, 1e9, 16)  # type: ignore[arg-type]
    assert [tried.codec for tried in choice.tried] == [c.fidelity for c in candidates[1:]]
    assert choice.codec is not None
    assert choice.codec.fidelity in {tried.codec for tried in choice.tried}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_distributions_that_are_no_numbers_choose_nothing_and_can_be_noted(bad: float) -> None:
    engine = held(200)
    talk = engine.log_probs

    def broken(ids: np.ndarray) -> np.ndarray:
        found = talk(ids)
        found[:, 3] = bad
        return found

    engine.log_probs = broken  # type: ignore[method-assign]
    choice = choose(engine, 1e9)
    json.dumps(choice.notes(), allow_nan=False)
    assert (choice.codec is None) is bool(np.isnan(bad))
