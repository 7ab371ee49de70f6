"""Which replica serves a request: one small function a routing, and the table that names them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvsnap.kvstore.simulation.replica import Replica
from kvsnap.kvstore.simulation.request import Request

LOAD_LIMIT = 1.25
"""Prefix routing passes over replicas with more than this times the mean load ("bounded loads",
Mirrokni et al. 2016): the prefix that all requests share would take them all to one replica."""

IN_FLIGHT = 16
"""Requests a replica, on average, that count as its load."""


class Routing(Protocol):
    """Chooses a replica. `load`: prompt tokens in flight on each of them."""

    def __call__(
        self, now: int, request: Request, replicas: Sequence[Replica], load: Sequence[int]
    ) -> int: ...


def prefix(now: int, request: Request, replicas: Sequence[Replica], load: Sequence[int]) -> int:
    """The longest stored prefix; among equals the least load. Overloaded replicas are left out."""
    limit = LOAD_LIMIT * (sum(load) + request.tokens) / len(load)
    return min(
        (number for number in range(len(replicas)) if load[number] <= limit),
        key=lambda number: (-replicas[number].found(request.chain), load[number]),
    )


def round_robin(
    now: int, request: Request, replicas: Sequence[Replica], load: Sequence[int]
) -> int:
    """One after the other."""
    return now % len(replicas)


def least_loaded(
    now: int, request: Request, replicas: Sequence[Replica], load: Sequence[int]
) -> int:
    """The fewest tokens in flight."""
    return min(range(len(replicas)), key=load.__getitem__)


ROUTINGS: dict[str, Routing] = {
    "prefix": prefix,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
}
"""Name on the command line → routing."""


class Load:
    """Prompt tokens in flight on each replica.

    A workload says when requests come, not how long they take: each is in flight until IN_FLIGHT
    times as many as there are replicas have come after it.
    """

    def __init__(self, replicas: int) -> None:
        self.tokens = [0] * replicas
        self._flying: deque[tuple[int, int]] = deque()

    def add(self, replica: int, tokens: int) -> None:
        self.tokens[replica] += tokens
        self._flying.append((replica, tokens))
        if len(self._flying) > IN_FLIGHT * len(self.tokens):
            done, its_tokens = self._flying.popleft()
            self.tokens[done] -= its_tokens
