"""Seconds over tokens, from a few measured points: straight lines between them, and beyond."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvsnap.formats.errors import Damaged

MAX_POINTS = 64
MAX_TOKENS = 2**31
MAX_SECONDS = 1e6


@dataclass(frozen=True)
class Curve:
    """(tokens, seconds), tokens ascending, at least one. Never falls: more work that was measured
    as less is noise, and the larger figure holds."""

    points: tuple[tuple[int, float], ...]

    def at(self, tokens: int) -> float:
        """Seconds for so many tokens; at 0 what a call costs whatever its length is."""
        known = self._rising
        number = bisect.bisect_left(known, (tokens, 0.0))
        if number == len(known):
            return known[-1][1] + self._slope() * (tokens - known[-1][0])
        (low, before), (high, after) = known[max(0, number - 1)], known[number]
        if number == 0:
            low, before = 0, self._start()
        return before + (after - before) * (tokens - low) / (high - low)

    def to_json(self) -> list[list[float]]:
        return [[tokens, seconds] for tokens, seconds in self.points]

    @functools.cached_property
    def _rising(self) -> list[tuple[int, float]]:
        tokens, seconds = zip(*self.points, strict=True)
        return list(zip(tokens, itertools.accumulate(seconds, max), strict=True))

    def _start(self) -> float:
        """Where the line through the first two points meets 0 tokens; 0 with one point."""
        known = self._rising
        if len(known) == 1:
            return 0.0
        (low, before), (high, after) = known[:2]
        return max(0.0, before - (after - before) * low / (high - low))

    def _slope(self) -> float:
        """Seconds a token beyond the last point: as between the last two. Where those are level, or
        there is one, as from nothing to the last: no work is free however long it gets."""
        known = self._rising
        (high, after), mean = known[-1], known[-1][1] / known[-1][0]
        if len(known) == 1:
            return mean
        low, before = known[-2]
        return (after - before) / (high - low) or mean


def curve(points: Iterable[tuple[int, float]]) -> Curve:
    """Points in any order."""
    return Curve(tuple(sorted(points)))


def curve_from_json(value: Any) -> Curve:
    """Inverse of `Curve.to_json`; raises `Damaged` for anything that cannot have been measured."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_POINTS:
        raise Damaged(f"a curve is no list of 1 to {MAX_POINTS} points")
    found: dict[int, float] = {}
    for point in value:
        if not isinstance(point, list) or len(point) != 2:
            raise Damaged("a point is no pair")
        tokens, seconds = point
        if type(tokens) is not int or not 1 <= tokens <= MAX_TOKENS or tokens in found:
            raise Damaged("a point's tokens are no length, or one that is there already")
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_SECONDS:
            raise Damaged("a point's seconds are no time")
        found[tokens] = float(seconds)
    return curve(found.items())
