"""Which blocks go when room is needed: the least recently used among the leaves.

An interior block is protected by its children: without it they could never be used again. Recency
is a request counter, not a clock, and a request touches its deepest block only: when a leaf goes its
time passes to the block before, so that each block counts as used when anything after it was. The
order that comes out is the one of touching every block of every chain.

The store (index.py), the tier in memory (ram.py) and `kvsnap simulate` all run this very code.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Leaf(Generic[K]):
    """A block without a stored child that nobody holds. `order` settles equal times."""

    used: int
    order: int
    block: K


@dataclass(frozen=True, slots=True)
class Above(Generic[K]):
    """The block before another; `held`: pinned or leased."""

    block: K
    used: int
    order: int
    children: int
    held: bool


class Tree(Protocol[K]):
    """What a policy asks of the stored blocks. Nothing may change while it is asked."""

    def leaves(self) -> Iterator[Leaf[K]]:
        """Leaves that nobody holds, from the least recently used on."""

    def above(self, block: K) -> Above[K] | None:
        """The block before `block`; None for a first one."""


def inherited(own: int, gone: int) -> int:
    """When a block counts as used after a child that was used at `gone` went."""
    return max(own, gone)


def leaf_lru(tree: Tree[K]) -> Iterator[K]:
    """Blocks in the order in which they go, as if each had gone when it is named.

    Lazy: to name one costs O(log n). Take as many as room is needed for.
    """
    freed: list[tuple[int, int, K]] = []
    left: dict[K, int] = {}
    leaves = tree.leaves()
    first = next(leaves, None)
    while first is not None or freed:
        if first is not None and (not freed or (first.used, first.order) < freed[0][:2]):
            used, block = first.used, first.block
            first = next(leaves, None)
        else:
            used, _, block = heapq.heappop(freed)
        yield block
        above = tree.above(block)
        if above is None:
            continue
        left[above.block] = left.get(above.block, above.children) - 1
        if left[above.block] == 0 and not above.held:
            heapq.heappush(freed, (inherited(above.used, used), above.order, above.block))
