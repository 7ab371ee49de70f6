"""Galloping search: the end of a chain in O(log n) look-ups, cheap where it is near the front."""

from __future__ import annotations

from collections.abc import Callable


def gallop(holds: Callable[[int], bool], count: int) -> int:
    """The first number in 0..count that does not hold, of a predicate that never comes back."""
    low, step = 0, 1
    while low + step <= count and holds(low + step - 1):
        low += step
        step *= 2
    high = min(low + step - 1, count)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low
