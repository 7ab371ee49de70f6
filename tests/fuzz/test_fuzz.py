"""A fixed number of changed inputs for everything that parses other people's bytes. `long.py` runs more."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.run import Tally, Violation, an_input, measured, run
from tests.fuzz.targets import TARGETS, Target

INPUTS = 300
EXAMPLES = 30
every_target = pytest.mark.parametrize("target", TARGETS, ids=[one.name for one in TARGETS])


@pytest.fixture(scope="module", autouse=True)
def measuring() -> Iterator[None]:
    with measured(TARGETS):
        yield


@every_target
def test_valid_inputs_are_accepted(target: Target) -> None:
    for data in target.seeds():
        outcome = run(target, data)
        assert (outcome.past, outcome.refused) == (True, "")


@every_target
def test_changed_inputs_are_read_or_refused_with_a_reason(target: Target) -> None:
    tally = Tally()
    for number in range(INPUTS):
        tally.add(run(target, an_input(Random(f"{target.name} {number}"), target)))
    # Else all of them might end at their digest, and what is behind it would not be tested.
    assert tally.past >= target.share * INPUTS
    assert tally.accepted > 0
    assert tally.refused.total() > INPUTS / 10


@every_target
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False))
def test_changes_that_hypothesis_chooses_are_read_or_refused(
    target: Target, random: Random
) -> None:
    run(target, an_input(random, target))


def test_a_violation_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of what must not happen, by a parser that does it."""
    (pin,) = (target for target in TARGETS if target.name == "pin")
    valid = pin.seeds()[0]

    def broken(error: Exception) -> Target:
        def parse(data: bytes) -> None:
            raise error

        return Target(pin.name, pin.seeds, pin.mutate, pin.past, parse)

    for error in (ValueError("x"), RecursionError(), MemoryError(), RuntimeWarning("x")):
        with pytest.raises(Violation, match=type(error).__name__):
            run(broken(error), valid)
