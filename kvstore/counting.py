"""Counters and histograms of this process: safe for threads, begun anew in a forked child.

Only the standard library is needed, so that everything can be counted, whether or not anybody asks.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of buckets: from a restore out of memory to a remote's timeout and its tries."""

Series = tuple[str, ...]
"""The values of a metric's labels."""

_lock = threading.RLock()
"""Reentrant: the garbage collector may run a finalizer that counts while this thread holds it."""
_metrics: list[Metric] = []


class Metric(ABC):
    """Values of series. The `known` ones are there from the start, at 0: a rate can only be told of
    what was seen before it grew."""

    def __init__(
        self, name: str, text: str, labels: Series = (), known: Iterable[Series] = ()
    ) -> None:
        """`text`: what is counted, for people."""
        self.name, self.text, self.labels = name, text, labels
        self._known = tuple(known) if labels else ((),)
        self.start_anew()
        _metrics.append(self)

    @abstractmethod
    def start_anew(self) -> None:
        """Back to the known series, at 0."""


class Counter(Metric):
    """A sum for each series."""

    def start_anew(self) -> None:
        self._sums: dict[Series, int] = dict.fromkeys(self._known, 0)

    def add(self, amount: int, *series: str) -> None:
        with _lock:
            self._sums[series] = self._sums.get(series, 0) + amount

    def read(self) -> dict[Series, int]:
        """A copy."""
        with _lock:
            return dict(self._sums)


@dataclass(frozen=True)
class Distribution:
    """`counts`: observations up to each of `SECONDS`, and at last all of them."""

    counts: tuple[int, ...]
    sum: float


class Histogram(Metric):
    """Seconds, in buckets, for each series."""

    def start_anew(self) -> None:
        self._buckets: dict[Series, list[int]] = {series: _empty() for series in self._known}
        self._sums: dict[Series, float] = dict.fromkeys(self._known, 0.0)

    def observe(self, seconds: float, *series: str) -> None:
        with _lock:
            buckets = self._buckets.get(series)
            if buckets is None:
                buckets = self._buckets[series] = _empty()
            buckets[bisect_left(SECONDS, seconds)] += 1
            self._sums[series] = self._sums.get(series, 0.0) + seconds

    def read(self) -> dict[Series, Distribution]:
        with _lock:
            return {
                series: Distribution(tuple(accumulate(buckets)), self._sums[series])
                for series, buckets in self._buckets.items()
            }


def _empty() -> list[int]:
    return [0] * (len(SECONDS) + 1)


def _start_anew() -> None:
    """In a forked child: what the parent did is the parent's to tell, and a thread that held the lock
    is not there to let it go."""
    global _lock
    _lock = threading.RLock()
    for metric in _metrics:
        metric.start_anew()


os.register_at_fork(after_in_child=_start_anew)
