"""Which blocks go when room is needed: one small class a policy, and the table that names them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from kvsnap.kvstore.forest import Forest
from kvsnap.kvstore.policy import leaf_lru
from kvsnap.kvstore.simulation.optimum import Optimum
from kvsnap.kvstore.simulation.replica import Replica
from kvsnap.kvstore.simulation.request import Workload


class LeafLru(Replica):
    """The store's own policy: `policy.leaf_lru` decides, on the tree of the tier in memory."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._tree: Forest[int] = Forest()

    def __contains__(self, block: object) -> bool:
        return block in self._tree

    def __len__(self) -> int:
        return len(self._tree)

    def use(self, chain: Sequence[int], now: int) -> None:
        hits = self.found(chain)
        last = chain[hits - 1] if hits else None
        if last is not None:
            self._tree.touch(last, now)
            self._tree.hold(last)
        self._make_room(len(chain) - hits)
        parent, room = last, self.capacity - len(self._tree)
        for block in chain[hits : hits + room]:
            self._tree.add(block, parent, now)
            parent = block
        if last is not None:
            self._tree.release(last)

    def _make_room(self, blocks: int) -> None:
        need = len(self._tree) + blocks - self.capacity
        if need <= 0:
            return
        # All are named before one goes: a tree must not change while it is asked.
        victims = list(islice(leaf_lru(self._tree), need))
        for block in victims:
            self._tree.remove(block)
        self.evictions += len(victims)


class _Flat(Replica):
    """A policy that knows no tree: blocks in the order in which they go."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._order

    def __len__(self) -> int:
        return len(self._order)


class Lru(_Flat):
    """The least recently used block goes, and strands what stands after it.

    A request uses its blocks from the first one on, so of equally recent ones the first goes first.
    """

    def use(self, chain: Sequence[int], now: int) -> None:
        for block in chain[: self.capacity]:
            self._order[block] = None
            self._order.move_to_end(block)
        while len(self._order) > self.capacity:
            self._order.popitem(last=False)
            self.evictions += 1


class Fifo(_Flat):
    """The block stored longest ago goes, however often it was used, and strands what follows."""

    def use(self, chain: Sequence[int], now: int) -> None:
        in_hand = chain[: self.capacity]
        new = [block for block in in_hand if block not in self._order]
        need = len(self._order) + len(new) - self.capacity
        if need > 0:
            stay = set(in_hand)
            for block in list(islice((b for b in self._order if b not in stay), need)):
                del self._order[block]
                self.evictions += 1
        self._order.update(dict.fromkeys(new))


POLICIES: dict[str, Callable[[int | None, Workload], Replica]] = {
    "leaf-lru": lambda capacity, workload: LeafLru(capacity),
    "lru": lambda capacity, workload: Lru(capacity),
    "fifo": lambda capacity, workload: Fifo(capacity),
    "opt": Optimum,
}
"""Name on the command line → an empty replica. The workload is for who may see the future."""

CLAIRVOYANT = {"opt"}
"""Policies that must serve the whole workload themselves: not for one replica of several."""
