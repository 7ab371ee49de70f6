"""Decoded blocks in host memory, in front of the disk: no file is read, no digest, nothing decoded.

What comes in was verified by whoever brings it (read with every check, or exported by the engine).
What goes out is compared again, token id by token id: a name is not believed here either. Blocks go
in the order in which the store's own go, and are never here without the block before them, so that
what is here and what is on the disk can be searched as one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvsnap.formats import names
from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import Damaged, UsageError
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Array, Layout, Rows
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.kvstore.compare import difference
from kvsnap.kvstore.forest import Forest
from kvsnap.kvstore.host_memory import HostMemory
from kvsnap.kvstore.policy import leaf_lru

if TYPE_CHECKING:
    from kvsnap.kvstore.wanted import Wanted


@dataclass(frozen=True, slots=True)
class _Kept:
    """Never changed once it is in the table: readers copy from it without the lock."""

    record: BlockRecord
    rows: Rows
    cost: int


class Ram:
    """At most `capacity` bytes of rows and token ids. For any number of threads.

    `pinned`: page-locked memory, from which a GPU's engine copies faster; plain memory where there
    is no GPU. A block that is evicted while a thread copies it lives until that thread is done.
    """

    def __init__(self, capacity: int, *, pinned: bool = False) -> None:
        if capacity < 0:
            raise UsageError(f"a tier of {capacity} bytes", "give 0 or more")
        self.capacity = capacity
        self.memory = HostMemory(pinned=pinned)
        self.bytes = 0
        """Taken, or promised to a block that is being copied in; never more than `capacity`."""
        self.hits = 0
        """Blocks that were read from here."""
        self._lock = threading.Lock()
        self._kept: dict[bytes, _Kept] = {}
        self._coming: set[bytes] = set()
        self._forest: Forest[bytes] = Forest()
        self._clock = 0

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def pin(self) -> None:
        """Page-locked memory from the next block on: an engine on a GPU is going to read."""
        if not self.memory.wants_pinned:
            self.memory = HostMemory(pinned=True)

    def read_into(
        self,
        root: Root,
        wanted: Wanted,
        layout: Layout,
        out: Mapping[str, np.ndarray],
        tokens: slice,
    ) -> bool:
        """Copy rows [tokens) of a block into `out`; False, and nothing copied, where it is not
        here or is another one than `wanted`. As `Blocks.read_into` otherwise."""
        kept = self._kept.get(wanted.name)
        if kept is None or difference(kept.record, root, wanted) is not None:
            return False
        count = len(kept.record.token_ids)
        try:
            layout.check(kept.rows, count)
        except Damaged:
            return False
        for name, array in out.items():
            rows = kept.rows[name]
            array[...] = rows if tokens == slice(0, count) else rows[:, tokens]
        with self._lock:
            self.hits += 1
        return True

    def keep(self, record: BlockRecord, rows: Rows) -> None:
        """Copy a block in, where the one before it is here; room is made first.

        Nothing happens where it is larger than what others than its own chain take up, or where
        the machine has no memory left: this is a shortcut, never a reason to fail.
        """
        cost = sum(self.memory.cost(array.nbytes) for array in rows.values())
        cost += record.token_ids.nbytes
        with self._lock:
            if record.name in self._kept:
                self._touch(record.name)
                return
            if not self._promise(record, cost):
                return
        kept: _Kept | None = None
        try:
            # The identity is some kilobytes of text that thousands of blocks share.
            identity = sys.intern(record.identity)
            own = replace(record, token_ids=record.token_ids.copy(), identity=identity)
            kept = _Kept(own, {name: self._copy(array) for name, array in rows.items()}, cost)
        except MemoryError:
            return
        finally:
            with self._lock:
                self._settle(record, kept, cost)

    def keep_chain(self, root: Root, wanted: Sequence[Wanted], rows: Rows, start: int) -> None:
        """Keep those blocks of a chain, in its order, that `rows` hold whole, and count it as used.

        `rows` begin with position `start`.
        """
        held = min((array.shape[1] for array in rows.values()), default=0)
        deepest: bytes | None = None
        for block in wanted:
            low, high = block.start - start, block.start + len(block.token_ids) - start
            if block.name not in self and low >= 0 and high <= held:
                record = _whole_record(root, block)
                if record is not None:
                    self.keep(record, {name: array[:, low:high] for name, array in rows.items()})
            if block.name in self:
                deepest = block.name
        if deepest is not None:
            self.touch(deepest)

    def touch(self, deepest: bytes) -> None:
        """A request used the chain that ends with this block; nothing where it is not here."""
        with self._lock:
            if deepest in self._kept:
                self._touch(deepest)

    def _touch(self, name: bytes) -> None:
        self._clock += 1
        self._forest.touch(name, self._clock)

    def _promise(self, record: BlockRecord, cost: int) -> bool:
        """Make room for a block and hold what it stands on, until `_settle`."""
        first = record.parent == ZERO_PARENT
        if record.name in self._coming or not (first or record.parent in self._kept):
            return False
        if not first:
            self._forest.hold(record.parent)
        victims = self._victims(self.bytes + cost - self.capacity)
        if victims is None:
            if not first:
                self._forest.release(record.parent)
            return False
        for name in victims:
            self._forest.remove(name)
            self.bytes -= self._kept.pop(name).cost
        self.bytes += cost
        self._coming.add(record.name)
        return True

    def _settle(self, record: BlockRecord, kept: _Kept | None, cost: int) -> None:
        parent = None if record.parent == ZERO_PARENT else record.parent
        self._coming.discard(record.name)
        if kept is None:
            self.bytes -= cost
        else:
            self._clock += 1
            self._forest.add(record.name, parent, self._clock)
            self._kept[record.name] = kept
        if parent is not None:
            self._forest.release(parent)

    def _victims(self, bytes_needed: int) -> list[bytes] | None:
        """Blocks to evict for so many bytes; None where all that may go is not enough."""
        victims: list[bytes] = []
        if bytes_needed <= 0:
            return victims
        for name in leaf_lru(self._forest):
            victims.append(name)
            bytes_needed -= self._kept[name].cost
            if bytes_needed <= 0:
                return victims
        return None

    def _copy(self, array: Array) -> Array:
        own = self.memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
        own[...] = array
        return own


def _whole_record(root: Root, block: Wanted) -> BlockRecord | None:
    """The record of a block whose ids are all known; of a sibling only those of its front are, and
    they make another name."""
    if names.block_name(root.key, block.parent, block.token_ids) != block.name:
        return None
    return block.record(root)
