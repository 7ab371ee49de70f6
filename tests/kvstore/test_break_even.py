"""Whether a restore is worth it: from measured points, and never from a record that makes no sense."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import root_of
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import break_even
from kvsnap.kvstore.break_even import BreakEven, Record, key_of, this_machine
from kvsnap.kvstore.curve import Curve, curve, curve_from_json
from kvsnap.kvstore.place import Place, read_settings, write_settings
from kvsnap.testing.stamped import StampedEngine

KEY = "ab" * 32
RECORD = Record(
    prefill=curve([(1, 0.010), (64, 0.010), (256, 0.058), (1024, 0.250)]),
    restore={
        "memory": curve([(64, 0.002), (1024, 0.020)]),
        "disk": curve([(64, 0.030), (256, 0.040), (1024, 0.080)]),
    },
    model="m.gguf",
    codec="zstd",
    measured=1_700_000_000,
    machine=this_machine(),
)
KNOWN = BreakEven({KEY: RECORD})


def at(points: list[tuple[int, float]], tokens: int) -> float:
    return curve(points).at(tokens)


def test_between_two_points_time_goes_in_a_straight_line() -> None:
    points = [(100, 1.0), (200, 3.0), (400, 4.0)]
    assert [at(points, n) for n in (100, 150, 200, 300, 400)] == [1.0, 2.0, 3.0, 3.5, 4.0]


def test_beyond_the_longest_length_the_last_slope_holds() -> None:
    assert at([(100, 1.0), (200, 3.0)], 400) == pytest.approx(7.0)
    assert at([(200, 3.0)], 400) == pytest.approx(6.0)


def test_no_work_is_free_beyond_a_level_end() -> None:
    assert at([(100, 3.0), (200, 3.0)], 400) == pytest.approx(6.0)


def test_before_the_shortest_length_it_goes_to_what_a_call_costs_anyhow() -> None:
    points = [(100, 3.0), (200, 5.0)]
    assert (at(points, 0), at(points, 50)) == (1.0, 2.0)
    assert at([(100, 1.0), (200, 5.0)], 0) == 0.0, "not below nothing"
    assert at([(100, 1.0)], 50) == 0.5


def test_more_tokens_measured_as_less_time_are_noise() -> None:
    assert at([(100, 2.0), (200, 1.0), (300, 3.0)], 200) == 2.0


@given(
    st.dictionaries(st.integers(1, 2**31), st.floats(1e-9, 1e6), min_size=1, max_size=8),
    st.lists(st.integers(0, 2**32), min_size=2, max_size=2),
)
def test_any_curve_is_finite_and_never_falls(found: dict[int, float], lengths: list[int]) -> None:
    drawn = curve(found.items())
    low, high = (drawn.at(tokens) for tokens in sorted(lengths))
    assert 0.0 <= low <= high * (1 + 1e-9)
    assert math.isfinite(high)
    assert curve_from_json(json.loads(json.dumps(drawn.to_json()))) == drawn


def test_without_a_record_everything_is_restored() -> None:
    for known in (BreakEven({}), BreakEven({"cd" * 32: RECORD})):
        assert known.worth(KEY, 0, 64, 65).worth


def test_a_restore_that_is_clearly_slower_is_not_worth_it_and_the_reason_says_why() -> None:
    assert KNOWN.worth(KEY, 64, 100, 300).reason == (
        "not worth it: restoring 36 tokens takes about 29 ms, computing them 9 ms"
    )
    assert not KNOWN.worth(KEY, 64, 100, 300).worth
    assert KNOWN.worth(KEY, 0, 1024, 1025).worth, "80 ms against 240"


@pytest.mark.parametrize(("restoring", "worth"), [(0.048, True), (0.095, True), (0.097, False)])
def test_a_restore_that_is_a_little_slower_is_done_all_the_same(
    restoring: float, worth: bool
) -> None:
    known = BreakEven({KEY: replace(RECORD, restore={"disk": curve([(256, restoring)])})})
    assert known.worth(KEY, 0, 256, 257).worth is worth, "computing takes 48 ms"


def test_what_a_call_costs_counts_only_where_the_restore_spares_the_call() -> None:
    """An engine takes 10 ms for one token or 64: with one token left to compute nothing is won."""
    known = BreakEven({KEY: replace(RECORD, restore={"disk": curve([(64, 0.009)])})})
    assert known.worth(KEY, 0, 64, 64).worth
    assert not known.worth(KEY, 0, 64, 65).worth
    assert not known.worth(KEY, 0, 64, 1000).worth


def test_what_the_engine_holds_already_is_not_counted() -> None:
    assert RECORD.computing(256, 1024, 2000) == pytest.approx(0.192)
    assert RECORD.restoring(256, 1024, "disk") == pytest.approx(0.0667, abs=1e-4)
    assert RECORD.restoring(64, 64 + 256, "disk") == pytest.approx(0.040)


def test_each_tier_has_a_verdict_of_its_own() -> None:
    assert KNOWN.worth(KEY, 0, 256, 300, "memory").worth
    assert not KNOWN.worth(KEY, 0, 70, 300, "disk").worth
    assert KNOWN.worth(KEY, 0, 70, 300, "cold").worth, "not measured: restored"


def test_nothing_to_restore_is_no_reason_against_it() -> None:
    assert KNOWN.worth(KEY, 64, 64, 65).worth


def test_a_record_of_another_machine_is_no_record() -> None:
    known = BreakEven({KEY: replace(RECORD, machine="another")})
    assert known.worth(KEY, 0, 64, 65).worth


def test_the_key_is_the_same_for_every_tenant_and_another_for_other_settings() -> None:
    def identity(size: int, weights: str = "w") -> Any:
        return StampedEngine(weights=weights).identity(size, lambda path: "")

    tenant = Tenant(bytes(range(32)))
    assert key_of(root_of(identity(16), tenant).identity) == key_of(root_of(identity(16)).identity)
    others = {key_of(root_of(i).identity) for i in (identity(16), identity(32), identity(16, "v"))}
    assert len(others) == 3


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "store", 16)


def test_a_record_is_read_as_it_was_written_and_settings_stay(place: Place) -> None:
    write_settings(place)
    before = read_settings(place)
    break_even.write(place, KEY, RECORD)
    other = replace(RECORD, model="other.gguf", measured=1_700_000_001)
    break_even.write(place, "cd" * 32, other)
    assert break_even.read(place) == BreakEven({KEY: RECORD, "cd" * 32: other})
    again = replace(RECORD, measured=1_700_000_002)
    break_even.write(place, KEY, again)
    assert break_even.read(place).records == {KEY: again, "cd" * 32: other}
    assert read_settings(place).block_size == before.block_size == 16
    assert not list(place.temporary.iterdir())


def test_only_the_newest_records_are_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(break_even, "MAX_RECORDS", 3)
    for number in (5, 1, 4, 2):
        break_even.write(place, f"{number:064x}", replace(RECORD, measured=number))
    assert [r.measured for r in break_even.read(place).records.values()] == [2, 4, 5]


def test_a_store_without_settings_has_no_records_and_is_not_created(place: Place) -> None:
    assert break_even.read(place) == BreakEven({})
    assert not place.root.exists()


FILES = {
    "empty": b"",
    "rubbish": b"\xff\xfe",
    "a list": b"[1]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "a long number": b'{"break_even": ' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("kind", FILES)
def test_damaged_settings_are_as_good_as_no_record(place: Place, kind: str) -> None:
    write_settings(place)
    place.settings.write_bytes(FILES[kind])
    assert break_even.read(place).records == {}


GOOD = break_even.to_json(RECORD)
WRONG: dict[str, Any] = {
    "a list": [],
    "null": None,
    "no prefill": {k: v for k, v in GOOD.items() if k != "prefill"},
    "no restore": {k: v for k, v in GOOD.items() if k != "restore"},
    "restore a list": GOOD | {"restore": [[1, 2]]},
    "a tier null": GOOD | {"restore": {"disk": None}},
    "no points": GOOD | {"prefill": []},
    "points an object": GOOD | {"prefill": {"64": 1}},
    "a point of three": GOOD | {"prefill": [[64, 1.0, 2.0]]},
    "a point of text": GOOD | {"prefill": ["64"]},
    "tokens 0": GOOD | {"prefill": [[0, 1.0]]},
    "tokens true": GOOD | {"prefill": [[True, 1.0]]},
    "tokens a fraction": GOOD | {"prefill": [[64.0, 1.0]]},
    "tokens beyond all": GOOD | {"prefill": [[2**40, 1.0]]},
    "one length twice": GOOD | {"prefill": [[64, 1.0], [64, 2.0]]},
    "seconds 0": GOOD | {"prefill": [[64, 0]]},
    "seconds negative": GOOD | {"prefill": [[64, -1.0]]},
    "seconds NaN": GOOD | {"prefill": [[64, math.nan]]},
    "seconds endless": GOOD | {"prefill": [[64, math.inf]]},
    "seconds true": GOOD | {"prefill": [[64, True]]},
    "seconds text": GOOD | {"prefill": [[64, "1"]]},
    "too many points": GOOD | {"prefill": [[n, 1.0] for n in range(1, 1000)]},
    "measured text": GOOD | {"measured": "today"},
    "measured true": GOOD | {"measured": True},
    "measured far ahead": GOOD | {"measured": int(time.time()) + 10**9},
    "a long model": GOOD | {"model": "x" * 10_000},
    "machine a number": GOOD | {"machine": 1},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_record_that_makes_no_sense_is_passed_over_with_a_problem(
    place: Place, what: str
) -> None:
    break_even.write(place, KEY, RECORD)
    settings = json.loads(place.settings.read_text())
    settings["break_even"]["cd" * 32] = WRONG[what]
    place.settings.write_text(json.dumps(settings))
    found = break_even.read(place)
    assert found.records == {KEY: RECORD}
    (problem,) = found.problems
    assert "cdcdcdcdcdcd" in problem
    assert "\n" not in problem
    assert found.worth("cd" * 32, 0, 64, 65).worth
    break_even.write(place, KEY, RECORD)
    assert break_even.read(place).problems == (), "the next measurement drops it"


def test_records_that_are_no_object_are_passed_over_with_a_problem(place: Place) -> None:
    write_settings(place)
    settings = json.loads(place.settings.read_text())
    place.settings.write_text(json.dumps(settings | {"break_even": [1]}))
    found = break_even.read(place)
    assert (found.records, len(found.problems)) == ({}, 1)


def test_unknown_tiers_and_fields_are_left_alone(place: Place) -> None:
    write_settings(place)
    settings = json.loads(place.settings.read_text())
    newer = GOOD | {"later": 1, "restore": GOOD["restore"] | {"remote": "?"}}
    place.settings.write_text(json.dumps(settings | {"break_even": {KEY: newer}}))
    assert break_even.read(place) == BreakEven({KEY: RECORD})


def test_a_curve_from_nothing_is_damage() -> None:
    with pytest.raises(Damaged):
        curve_from_json(None)
    assert curve_from_json([[64, 1]]) == Curve(((64, 1.0),))
