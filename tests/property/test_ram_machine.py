"""The tier in memory against a plain model: a dict of rows, and a least-recently-used leaf by search."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.wanted import Wanted
from kvsnap.testing.stamped import StampedEngine

SIZE = 2
ENGINES = [StampedEngine(layers=layers, head_dim=2, capacity=16) for layers in (1, 3)]
ROOTS = [root_of(engine.identity(SIZE, lambda path: "")) for engine in ENGINES]
CHAINS = st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=4))


@dataclass
class Plain:
    """One block of the model."""

    parent: bytes
    rows: Rows
    cost: int
    used: int


class RamMachine(RuleBasedStateMachine):
    """Two models of blocks of different sizes share one tier."""

    @initialize(capacity=st.integers(0, 500))
    def start(self, capacity: int) -> None:
        self.ram = Ram(capacity)
        self.plain: dict[bytes, Plain] = {}
        self.clock = 0
        self.seen: dict[bytes, tuple[Wanted, Root, int]] = {}

    @rule(which=CHAINS)
    def keep_the_last_block(self, which: tuple[int, list[int]]) -> None:
        blocks, rows = self._chain(which)
        self._keep(blocks[-1], rows, which[0])

    @rule(which=CHAINS, skip=st.integers(0, 2))
    def keep_a_chain(self, which: tuple[int, list[int]], skip: int) -> None:
        blocks, rows = self._chain(which)
        start = min(skip, len(blocks)) * SIZE
        self.ram.keep_chain(
            ROOTS[which[0]], blocks, {name: array[:, start:] for name, array in rows.items()}, start
        )
        for block in blocks:
            if block.start >= start and block.name not in self.plain:
                self._plain_keep(block, rows, which[0])
        deepest = [block for block in blocks if block.name in self.plain]
        if deepest:
            self._plain_touch(deepest[-1].name)

    @rule(which=CHAINS)
    def touch(self, which: tuple[int, list[int]]) -> None:
        name = self._chain(which)[0][-1].name
        self.ram.touch(name)
        self._plain_touch(name)

    @rule(which=CHAINS, low=st.integers(0, SIZE - 1), high=st.integers(1, SIZE))
    def read(self, which: tuple[int, list[int]], low: int, high: int) -> None:
        block, tokens = self._chain(which)[0][-1], slice(min(low, high - 1), high)
        layout = ENGINES[which[0]].layout
        out = layout.empty(tokens.stop - tokens.start)
        found = self.ram.read_into(ROOTS[which[0]], block, layout, out, tokens)
        assert found == (block.name in self.plain)
        if found:
            for name, array in self.plain[block.name].rows.items():
                assert np.array_equal(out[name], array[:, tokens])

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        here = {name for name in self.seen if name in self.ram}
        assert here == self.plain.keys()
        assert len(self.ram) == len(self.plain)
        assert self.ram.bytes == sum(block.cost for block in self.plain.values())
        assert self.ram.bytes <= self.ram.capacity
        for block in self.plain.values():
            assert block.parent == bytes(32) or block.parent in self.ram

    def _chain(self, which: tuple[int, list[int]]) -> tuple[list[Wanted], Rows]:
        number, symbols = which
        ids: TokenIds = np.repeat(np.array(symbols, np.uint32), SIZE)
        blocks = chain(chain_names(ROOTS[number].key, ids, SIZE), ids, SIZE)
        self.seen |= {block.name: (block, ROOTS[number], number) for block in blocks}
        return blocks, ENGINES[number].expected(ids)

    def _keep(self, block: Wanted, rows: Rows, number: int) -> None:
        root = ROOTS[number]
        record = BlockRecord(
            block.name, block.parent, root.root_id, block.start, block.token_ids, root.identity
        )
        part = {name: array[:, block.start : block.start + SIZE] for name, array in rows.items()}
        self.ram.keep(record, part)
        if block.name in self.plain:
            self._plain_touch(block.name)
        else:
            self._plain_keep(block, rows, number)

    def _plain_keep(self, block: Wanted, rows: Rows, number: int) -> None:
        """The naive rule: among leaves that are not before the new block, the one used longest
        ago goes, until there is room; nothing goes where that is not enough."""
        if block.parent != bytes(32) and block.parent not in self.plain:
            return
        cost = SIZE * (ENGINES[number].layout.token_bytes() + 4)
        left = dict(self.plain)
        before = set(self._upwards(block.parent))
        while sum(kept.cost for kept in left.values()) + cost > self.ram.capacity:
            parents = {kept.parent for kept in left.values()}
            leaves = [name for name in left if name not in parents and name not in before]
            if not leaves:
                return
            del left[min(leaves, key=lambda name: left[name].used)]
        part = {name: array[:, block.start : block.start + SIZE] for name, array in rows.items()}
        self.plain = left
        self.plain[block.name] = Plain(block.parent, part, cost, 0)
        self._plain_touch(block.name)

    def _plain_touch(self, name: bytes) -> None:
        """Every block of the chain is used now."""
        self.clock += 1
        for block in self._upwards(name):
            self.plain[block].used = self.clock

    def _upwards(self, name: bytes) -> list[bytes]:
        found: list[bytes] = []
        while name in self.plain:
            found.append(name)
            name = self.plain[name].parent
        return found


TestRam = RamMachine.TestCase
TestRam.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
