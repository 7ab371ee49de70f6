"""The offline optimum: the most block hits that any policy can have, as it knows what comes.

Belady with bypass: after each request those blocks are kept, among the stored ones and the
request's own, that are used again soonest. A prompt that uses a block uses all blocks before it, so
no block's next use is before its parent's; as the deeper of two equal blocks goes first, the kept
set is closed under parent by itself, and what is best for single blocks is best for chains.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvsnap.kvstore.simulation.replica import Replica
from kvsnap.kvstore.simulation.request import Workload

_STALE = 64
"""Stale entries beyond one a block that are not worth sweeping the heap for."""


class Optimum(Replica):
    """For one replica that serves the whole workload, in its order."""

    def __init__(self, capacity: int | None, workload: Workload) -> None:
        super().__init__(capacity)
        self._never = len(workload.requests)
        self._next_uses = next_uses(workload)
        self._kept: dict[int, tuple[int, int, int]] = {}
        """Block → (-next use, -depth, block): the smallest goes first."""
        self._heap: list[tuple[int, int, int]] = []

    def __contains__(self, block: object) -> bool:
        return block in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, chain: Sequence[int], now: int) -> None:
        new: set[int] = set()
        for depth, (block, next_use) in enumerate(zip(chain, self._next_uses[now], strict=True)):
            if block not in self._kept:
                if next_use == self._never and len(self._kept) >= self.capacity:
                    break  # neither it nor what follows is used again: not worth writing
                new.add(block)
            self._kept[block] = entry = (-next_use, -depth, block)
            heapq.heappush(self._heap, entry)
        self._make_room(new)

    def _make_room(self, new: set[int]) -> None:
        """Let go of what is used last. One of `new` is refused by that, not evicted."""
        while len(self._kept) > self.capacity:
            entry = heapq.heappop(self._heap)
            block = entry[2]
            if self._kept.get(block) == entry:
                del self._kept[block]
                self.evictions += block not in new
        if len(self._heap) > 2 * len(self._kept) + _STALE:
            self._heap = list(self._kept.values())
            heapq.heapify(self._heap)


def next_uses(workload: Workload) -> list[tuple[int, ...]]:
    """Of each request, of each of its blocks: the number of the next request that uses it; the
    number of requests where none does."""
    never = len(workload.requests)
    coming: dict[int, int] = {}
    found: list[tuple[int, ...]] = [()] * never
    for number in range(never - 1, -1, -1):
        chain = workload.requests[number].chain
        found[number] = tuple(coming.get(block, never) for block in chain)
        coming.update(dict.fromkeys(chain, number))
    return found
