"""One eviction order: the index, the tree in memory, the simulator and a naive model agree."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import StoreFull
from kvsnap.formats.names import chain_names
from kvsnap.kvstore.eviction import _IndexTree
from kvsnap.kvstore.forest import Forest
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.index import entry_of
from kvsnap.kvstore.policy import leaf_lru
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.simulation.policies import POLICIES
from kvsnap.kvstore.simulation.request import Chains, Request
from kvsnap.kvstore.store import Store
from kvsnap.testing.recount import stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import turn

BLOCK = 4

numbers = st.integers(0, 10**6)
histories = st.lists(
    st.one_of(
        st.tuples(st.just("put"), numbers, st.integers(1, 4)),
        st.tuples(st.just("put first"), numbers, st.integers(1, 3)),
        st.tuples(st.just("touch"), numbers, st.booleans()),
        st.tuples(st.just("hold"), numbers, st.booleans()),
        st.tuples(st.just("release"), numbers, st.booleans()),
        st.tuples(st.just("evict"), st.integers(1, 6), st.booleans()),
    ),
    min_size=4,
    max_size=30,
)


@contextlib.contextmanager
def a_store(**options: object) -> Iterator[Store]:
    """A store with blocks of four tokens; not tmp_path, which all examples would share."""
    where = os.environ.get("PYTEST_DEBUG_TEMPROOT")
    folder = Path(tempfile.mkdtemp(prefix="kvsnap-test-", dir=where))
    text = json.dumps({"block_size": BLOCK, "created": 1, "format": "1"})
    (folder / "kvsnap.json").write_text(text)
    store = Store(folder, min_free="0", **options)
    try:
        yield store
    finally:
        store.close()
        shutil.rmtree(folder)


class Naive:
    """Touches every block of every chain, and looks at every block for every eviction."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.holds: dict[int, int] = {}

    def use(self, block: int | None, now: int) -> None:
        while block is not None:
            self.used[block] = now
            block = self.parents[block]

    def order(self) -> list[int]:
        """All that may go, in the order in which it goes; numbers rise as blocks are stored."""
        left, gone = set(self.used), list[int]()
        while True:
            inner = {self.parents[block] for block in left}
            leaves = [b for b in left if b not in inner and not self.holds.get(b)]
            if not leaves:
                return gone
            gone.append(min(leaves, key=lambda block: (self.used[block], block)))
            left.remove(gone[-1])


class Three:
    """The same history in the index, in the tree in memory and in the naive model."""

    def __init__(self, store: Store) -> None:
        self.store, self.index = store, store.index
        self.forest: Forest[int] = Forest()
        self.naive = Naive()
        self.numbers = itertools.count(1)  # a name of zeros would say: no block before
        self.leases: list[tuple[int, Lease]] = []
        self.now = 0

    @property
    def stored(self) -> list[int]:
        return sorted(self.naive.used)

    def put(self, parent: int | None, count: int) -> None:
        """One request stores a chain of `count` blocks after `parent`."""
        self.touch(parent)
        for number in islice(self.numbers, count):
            before = self._name(parent) if parent is not None else bytes(32)
            ids = np.array([number], np.uint32)
            record = BlockRecord(self._name(number), before, "r", 0, ids, "i")
            with self.index.transaction() as db:
                self.index.insert(db, entry_of(record, 1, "raw"))
            self.forest.add(number, parent, self.now)
            self.naive.parents[number] = parent
            self.naive.use(number, self.now)
            parent = number

    def touch(self, block: int | None) -> None:
        self.index.count_request(self._name(block) if block is not None else None, 0, 0)
        self.index.write_notes()
        self.now += 1
        self.naive.use(block, self.now)
        if block is not None:
            self.forest.touch(block, self.now)

    def hold(self, block: int) -> None:
        lease = Lease(self.index, self.store.owner)
        assert lease.keep(self._name(block))
        self.leases.append((block, lease))
        self.forest.hold(block)
        self.naive.holds[block] = self.naive.holds.get(block, 0) + 1

    def release(self, at: int) -> None:
        block, lease = self.leases.pop(at)
        lease.end()
        self.forest.release(block)
        self.naive.holds[block] -= 1

    def evict(self, count: int) -> None:
        before = set(self.stored)
        plan = self.store.space.eviction.plan(count)  # every block counts one byte
        freed = self.store.space.eviction.apply(plan)
        gone = [int.from_bytes(name, "big") for name in freed.blocks]
        expected = self.naive.order()[:count]
        assert gone == expected
        assert list(islice(leaf_lru(self.forest), count)) == expected
        for block in expected:
            self.forest.remove(block)
            del self.naive.used[block], self.naive.parents[block]
        left = {int.from_bytes(n, "big") for (n,) in self.index.query("SELECT name FROM blocks")}
        assert left == before - set(expected)
        assert len(self.forest) == len(left)

    def check(self) -> None:
        """All of it, though nothing goes."""
        expected = self.naive.order()
        assert list(leaf_lru(self.forest)) == expected
        tree = _IndexTree(self.index)
        named = [tree.victims[number].name for number in leaf_lru(tree)]
        assert [int.from_bytes(name, "big") for name in named] == expected

    @staticmethod
    def _name(number: int) -> bytes:
        return number.to_bytes(32, "big")


@settings(max_examples=150)
@given(history=histories)
def test_index_and_tree_evict_what_touching_every_block_of_every_chain_would_evict(
    history: list[tuple[str, int, int]],
) -> None:
    with a_store() as store:
        three = Three(store)
        for what, number, more in history:
            stored = three.stored
            if what == "evict":
                three.evict(number)
            elif what == "put first" or (what == "put" and not stored):
                three.put(None, int(more))
            elif what == "put":
                three.put(stored[number % len(stored)], int(more))
            elif what == "touch" and stored:
                three.touch(stored[number % len(stored)])
            elif what == "hold" and stored:
                three.hold(stored[number % len(stored)])
            elif what == "release" and three.leases:
                three.release(number % len(three.leases))
        three.check()


prompts = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=4, max_size=20)


def ids_of(prompt: list[int]) -> list[int]:
    """The tokens of a prompt whose blocks hold these numbers, and one that is computed anyhow."""
    return [number for number in prompt for _ in range(BLOCK)] + [9]


@settings(max_examples=60)
@given(prompts=prompts, capacity=st.integers(1, 7))
def test_the_simulator_keeps_exactly_what_a_store_with_that_many_equal_blocks_keeps(
    prompts: list[list[int]], capacity: int
) -> None:
    chains = Chains()
    requests = [Request(chains.chain(prompt), len(ids_of(prompt))) for prompt in prompts]
    workload = chains.workload("test", BLOCK, requests)
    replica = POLICIES["leaf-lru"](capacity, workload)
    with a_store(capacity=capacity * one_block()) as store:
        names: dict[bytes, int] = {}
        for now, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            ids, engine = np.array(ids_of(prompt), np.uint32), StampedEngine()
            root = Session(store, engine).root
            names.update(zip(chain_names(root.key, ids, BLOCK), request.chain, strict=True))
            hits = replica.found(request.chain)
            with contextlib.suppress(StoreFull):  # the simulator keeps a chain's front as well
                turn(store, engine, ids, codec="raw")
            assert len(ids) - engine.evaluated - hits * BLOCK in range(BLOCK)
            engine.check_rows()
            replica.use(request.chain, now)
            kept = {block for block in range(len(workload.parents)) if block in replica}
            assert {names[name] for name in stored_blocks(store.place)} == kept
        evicted = store.index.query("SELECT value FROM counters WHERE name = 'evicted_blocks'")
        assert evicted == [(replica.evictions,)]


def one_block() -> int:
    """Bytes of a block file; the same for every block of a test, as headers are padded."""
    if not _SIZES:
        with a_store() as store:
            turn(store, StampedEngine(), ids_of([0, 1, 2, 0, 1]), codec="raw")
            _SIZES.update(size for _, size in stored_blocks(store.place).values())
    (size,) = _SIZES
    return size


_SIZES: set[int] = set()
