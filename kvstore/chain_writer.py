"""Store the filled blocks that an engine holds and the store lacks, and its state checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvsnap.formats.codecs import Codec, lossless
from kvsnap.formats.errors import Vanished
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import ZERO_PARENT, TokenIds, chain_names
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.match import chain, state_at_end
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

SLAB_BLOCKS = 8
"""Blocks exported at once: memory beyond the engine's stays at a few blocks."""
STATES_AT_ONCE = 4
"""State checkpoints that wait in memory to be stored; each may take some MB."""


@dataclass(frozen=True, eq=False)
class State:
    """A state checkpoint, taken out of the engine."""

    wanted: Wanted
    rows: Rows


class RowSource(Protocol):
    """What a writer asks of an engine, or of rows that were taken out of one."""

    @property
    def layout(self) -> Layout: ...

    def token_ids(self) -> TokenIds: ...

    def export(self, start: int, stop: int) -> Rows: ...

    def export_state(self) -> Rows: ...


class ChainWriter:
    """Writes for one engine under one root, and counts what it wrote since `start_anew`."""

    def __init__(self, store: Store, engine: RowSource, root: Root, codec: Codec) -> None:
        self.store, self.engine, self.root, self.codec = store, engine, root, codec
        self.waiting: list[State] = []
        """Checkpoints that are taken and not stored yet."""
        self.start_anew()

    def start_anew(self) -> None:
        self.written: dict[bytes, int] = {}
        """Name → bytes of the file."""
        self.states: dict[bytes, int] = {}
        """State checkpoints that were put, whether their files were there (0) or written."""
        self.raw = 0
        """Bytes of the written rows, as the engine had them."""

    def chain(self) -> list[Wanted]:
        """The filled blocks of what the engine holds, stored or not."""
        ids, size = self.engine.token_ids(), self.store.block_size
        return chain(chain_names(self.root.key, ids, size), ids, size)

    def stored(self, wanted: Sequence[Wanted]) -> int:
        """How many of a chain's blocks the index has, from the front."""
        return self.store.index.depth([block.name for block in wanted])

    def lease_stored(self, wanted: Sequence[Wanted], lease: Lease) -> int:
        """Keep what is stored of a chain; how many blocks that are."""
        known = self.stored(wanted)
        last = wanted[known - 1].name if known else b""
        if last != lease.name and not lease.keep(last):
            raise Vanished("a block was evicted before it could be leased", "save again")
        return known

    def put(self, wanted: Sequence[Wanted], lease: Lease, *, check_all: bool = False) -> None:
        """Store and lease a whole chain; `check_all` looks at the files of those that the index has,
        too. What was written before an error is kept, and found by the next try."""
        known = self.lease_stored(wanted, lease)
        missing = [
            w for w in wanted[0 if check_all else known :] if not self.store.blocks.has(w.name)
        ]
        if missing:
            self.store.calibrations.require(self.codec)
        for first in range(0, len(missing), SLAB_BLOCKS):
            self._put(missing[first : first + SLAB_BLOCKS], lease)
        last = wanted[-1].name if wanted else b""
        if last != lease.name and not lease.keep(last):  # another process stored the end of it
            raise Vanished("a block was evicted before it could be leased", "save again")

    def take_state(self) -> State | None:
        """The checkpoint at the position where the engine stands; None where it needs none."""
        layout, ids, size = self.engine.layout, self.engine.token_ids(), self.store.block_size
        if not layout.needs_state or not len(ids):
            return None
        wanted = state_at_end(self.root.key, chain_names(self.root.key, ids, size), ids, size)
        rows = dict(self.engine.export_state())
        if wanted.start < wanted.stop:
            rows |= self.engine.export(wanted.start, wanted.stop)
        else:
            rows |= layout.in_blocks.empty(0)
        return State(wanted, rows)

    def waiting_on(self, wanted: Sequence[Wanted]) -> list[State]:
        """The checkpoints that wait and stand on this chain; the engine went to other tokens from
        where the rest was taken, which is dropped."""
        parents = {ZERO_PARENT, *(block.name for block in wanted)}
        self.waiting = [state for state in self.waiting if state.wanted.parent in parents]
        return list(self.waiting)

    def put_states(self, states: Sequence[State], lease: Lease) -> None:
        """Store checkpoints whose blocks are stored; they wait no longer."""
        for state in list(states):
            name, codec = state.wanted.name, lossless(self.codec)
            size = self.store.blocks.put(
                self.root, state.wanted, codec, self.engine.layout, state.rows, lease
            )
            self.states[name] = size or self.states.get(name, 0)
            if state in self.waiting:
                self.waiting.remove(state)
            if size:
                self.raw += sum(array.nbytes for array in state.rows.values())

    def _put(self, slab: Sequence[Wanted], lease: Lease) -> None:
        start, stop = slab[0].start, slab[-1].start + self.store.block_size
        rows = self.engine.export(start, stop)
        layout = self.engine.layout.in_blocks
        for wanted in slab:
            low = wanted.start - start
            own = {
                name: array[:, low : low + self.store.block_size] for name, array in rows.items()
            }
            size = self.store.blocks.put(self.root, wanted, self.codec, layout, own, lease)
            if size:
                self.written[wanted.name] = size
                self.raw += sum(array.nbytes for array in own.values())
        ram = self.store.blocks.ram
        # Exact rows in memory under a lossy name would make a resume depend on where it read.
        if ram is not None and not self.codec.lossy:
            ram.keep_chain(self.root, slab, rows, start)
