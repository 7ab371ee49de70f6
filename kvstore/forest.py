"""Stored blocks as a tree in memory: what the tier in memory and the simulator keep.

It answers a policy as the index does; tests/property/test_eviction_order.py compares the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvsnap.kvstore.policy import Above, Leaf, inherited

K = TypeVar("K", bound=Hashable)
_STALE = 64
"""Stale entries beyond one a block that are not worth sweeping the heap for."""


@dataclass(slots=True)
class _Node(Generic[K]):
    parent: K | None
    used: int
    order: int
    children: int = 0
    holds: int = 0


class Forest(Generic[K]):
    """Blocks, each after the one before it. Closed under parent at every step."""

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._heap: list[tuple[int, int, K]] = []
        """Every leaf that nobody holds, and stale entries, which are passed over when met."""
        self._added = 0

    def __contains__(self, block: object) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, block: K, parent: K | None, used: int) -> None:
        """Store a block after `parent`, which must be stored; KeyError where it is not."""
        if parent is not None:
            self._nodes[parent].children += 1
        self._added += 1
        self._nodes[block] = _Node(parent, used, self._added)
        self._offer(block)

    def touch(self, block: K, used: int) -> None:
        """A request used the chain that ends with `block`."""
        self._nodes[block].used = used
        self._offer(block)

    def hold(self, block: K) -> None:
        """Keep a block, and so all before it, until `release` is called as often."""
        self._nodes[block].holds += 1

    def release(self, block: K) -> None:
        self._nodes[block].holds -= 1
        self._offer(block)

    def remove(self, block: K) -> None:
        """Take out a leaf that nobody holds; its time passes to the block before."""
        node = self._nodes[block]
        if node.children or node.holds:
            raise ValueError(f"{block!r} has {node.children} children and {node.holds} holds")
        del self._nodes[block]
        if node.parent is not None:
            above = self._nodes[node.parent]
            above.children -= 1
            above.used = inherited(above.used, node.used)
            self._offer(node.parent)

    def leaves(self) -> Iterator[Leaf[K]]:
        """Leaves that nobody holds, from the least recently used on; see `policy.Tree`."""
        taken: list[tuple[int, int, K]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if not self._is_leaf(entry) or (taken and taken[-1] == entry):
                    continue
                taken.append(entry)
                yield Leaf(*entry)
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)

    def above(self, block: K) -> Above[K] | None:
        parent = self._nodes[block].parent
        if parent is None:
            return None
        node = self._nodes[parent]
        return Above(parent, node.used, node.order, node.children, node.holds > 0)

    def _offer(self, block: K) -> None:
        node = self._nodes[block]
        if not node.children and not node.holds:
            heapq.heappush(self._heap, (node.used, node.order, block))
            if len(self._heap) > 2 * len(self._nodes) + _STALE:
                self._heap = [entry for entry in set(self._heap) if self._is_leaf(entry)]
                heapq.heapify(self._heap)

    def _is_leaf(self, entry: tuple[int, int, K]) -> bool:
        used, order, block = entry
        node = self._nodes.get(block)
        return (
            node is not None
            and not node.children
            and not node.holds
            and ((node.used, node.order) == (used, order))
        )
