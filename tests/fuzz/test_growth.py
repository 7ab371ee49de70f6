"""Memory and work grow with the input, and no faster: hostile files cannot be small and cost much."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from tests.fuzz.foreign_grown import FOREIGN_GROWN
from tests.fuzz.grown import GROWN, Maker
from tests.fuzz.run import measured, run
from tests.fuzz.targets import TARGETS, Target

_NAMES = {target.name: target for target in TARGETS}
growing = pytest.mark.parametrize(
    ("target", "make", "many"),
    [
        pytest.param(_NAMES[name], make, many, id=f"{name}, {make.__name__} {many}")
        for name, make, many in (*GROWN, *FOREIGN_GROWN)
    ],
)


@growing
def test_memory_is_bounded_by_the_size_of_the_input(target: Target, make: Maker, many: int) -> None:
    data = make(many)
    assert len(data) > many
    with measured([target]):
        run(target, data)


@growing
def test_work_grows_no_faster_than_the_input(target: Target, make: Maker, many: int) -> None:
    calls = [_calls(target, make(number)) for number in (many // 20, many // 10)]
    assert calls[1] < 2.5 * calls[0]


def _calls(target: Target, data: bytes) -> int:
    """Functions called, Python's and C's: seconds would say more of the machine than of the code."""
    count = 0

    def counting(frame: FrameType, event: str, what: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with measured([target]):
        sys.setprofile(counting)
        try:
            run(target, data)
        finally:
            sys.setprofile(None)
    return count
