"""The tier in memory: right rows or none, its budget at every moment, and what goes first."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats import names
from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.ram import Ram
from kvsnap.kvstore.wanted import Wanted
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

SIZE = 16
ENGINE = StampedEngine()
LAYOUT = ENGINE.layout
ROOT = root_of(ENGINE.identity(SIZE, lambda path: ""))
COST = SIZE * (LAYOUT.token_bytes() + 4)


def blocks_of(ids: TokenIds, root: Root = ROOT) -> list[Wanted]:
    return chain(chain_names(root.key, ids, SIZE), ids, SIZE)


def record_of(wanted: Wanted, root: Root = ROOT) -> BlockRecord:
    return BlockRecord(
        wanted.name, wanted.parent, root.root_id, wanted.start, wanted.token_ids, root.identity
    )


def filled(ids: TokenIds, capacity: int = 100 * COST) -> Ram:
    ram = Ram(capacity)
    ram.keep_chain(ROOT, blocks_of(ids), ENGINE.expected(ids), 0)
    return ram


def read(
    ram: Ram, wanted: Wanted, tokens: slice = slice(0, SIZE), root: Root = ROOT
) -> Rows | None:
    out = LAYOUT.empty(tokens.stop - tokens.start)
    for array in out.values():
        array.fill(9)
    if ram.read_into(root, wanted, LAYOUT, out, tokens):
        return out
    assert all((array == 9).all() for array in out.values()), "a miss has touched the rows"
    return None


def equal(one: Rows | None, other: Rows) -> bool:
    return one is not None and all(np.array_equal(one[name], other[name]) for name in other)


def cut(rows: Rows, start: int, stop: int) -> dict[str, Any]:
    return {name: array[:, start:stop] for name, array in rows.items()}


def test_a_chain_comes_back_as_it_was_kept() -> None:
    ids = some_ids(50)
    ram, expected = filled(ids), ENGINE.expected(ids)
    assert (len(ram), ram.bytes) == (3, 3 * COST)
    for block in blocks_of(ids):
        assert equal(read(ram, block), cut(expected, block.start, block.start + SIZE))
    assert ram.hits == 3


def test_a_part_of_a_block_and_the_front_of_a_sibling_are_given() -> None:
    ids = some_ids(32)
    ram, expected = filled(ids), ENGINE.expected(ids)
    last = blocks_of(ids)[1]
    assert equal(read(ram, last, slice(3, 9)), cut(expected, 19, 25))
    front = replace(last, token_ids=last.token_ids[:5])
    assert equal(read(ram, front, slice(0, 5)), cut(expected, 16, 21))


def test_callers_may_change_their_buffers() -> None:
    ids = some_ids(16)
    rows, expected = ENGINE.expected(ids), ENGINE.expected(ids)
    ram = Ram(COST)
    (block,) = blocks_of(ids)
    own_ids = block.token_ids.copy()
    ram.keep(record_of(replace(block, token_ids=own_ids)), rows)
    own_ids += 1
    for array in rows.values():
        array.fill(0)
    out = read(ram, block)
    assert equal(out, expected)
    assert out is not None
    for array in out.values():
        array.fill(0)
    assert equal(read(ram, block), expected)


OTHERS = {
    "another token id": lambda w: replace(w, token_ids=w.token_ids ^ np.uint32(1)),
    "more token ids": lambda w: replace(w, token_ids=np.append(w.token_ids, np.uint32(1))),
    "another parent": lambda w: replace(w, parent=bytes(32)),
    "another place": lambda w: replace(w, start=w.start + SIZE),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_name_alone_is_not_believed(what: str) -> None:
    ids = some_ids(32)
    assert read(filled(ids), OTHERS[what](blocks_of(ids)[1])) is None


@pytest.mark.parametrize("field", ["key", "root_id", "identity"])
def test_a_block_of_another_root_is_not_given(field: str) -> None:
    ids = some_ids(32)
    other = vars(root_of(StampedEngine(weights="others").identity(SIZE, lambda path: "")))
    root = replace(ROOT, **{field: other[field]})
    assert read(filled(ids), blocks_of(ids)[1], root=root) is None


def test_rows_of_another_shape_are_not_given() -> None:
    ids = some_ids(16)
    ram = Ram(100 * COST)
    wide = StampedEngine(head_dim=16)
    ram.keep(record_of(blocks_of(ids)[0]), wide.expected(ids))
    assert read(ram, blocks_of(ids)[0]) is None


def test_colliding_names_give_only_the_rows_of_the_ids_that_were_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def weak(key: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        return bytes([bytes(parts[0])[0] + 1]) + bytes(31)

    monkeypatch.setattr(names, "keyed_hash", weak)
    one, other = some_ids(32), some_ids(32, seed=2)
    ram = filled(one)
    ram.keep_chain(ROOT, blocks_of(other), ENGINE.expected(other), 0)
    assert [w.name for w in blocks_of(one)] == [w.name for w in blocks_of(other)]
    assert all(read(ram, block) is None for block in blocks_of(other))
    assert equal(read(ram, blocks_of(one)[1]), cut(ENGINE.expected(one), 16, 32))


def test_a_block_without_the_one_before_it_is_not_taken() -> None:
    ids = some_ids(48)
    ram, blocks, rows = Ram(100 * COST), blocks_of(ids), ENGINE.expected(ids)
    ram.keep_chain(ROOT, blocks[1:], cut(rows, 16, 48), 16)
    assert (len(ram), ram.bytes) == (0, 0)
    ram.keep_chain(ROOT, blocks, cut(rows, 0, 30), 0)
    assert [block.name in ram for block in blocks] == [True, False, False], (
        "30 tokens are one block"
    )
    ram.keep_chain(ROOT, blocks[1:], cut(rows, 20, 48), 20)
    assert len(ram) == 1, "rows from 20 on hold neither block 1 whole nor what block 2 stands on"


def test_the_front_of_a_sibling_is_not_kept() -> None:
    ids = some_ids(32)
    first, second = blocks_of(ids)
    ram = Ram(100 * COST)
    front = replace(second, token_ids=second.token_ids[:6])
    ram.keep_chain(ROOT, [first, front], cut(ENGINE.expected(ids), 0, 22), 0)
    assert [block.name in ram for block in (first, second)] == [True, False]


def test_a_block_larger_than_the_tier_is_refused_and_evicts_nothing() -> None:
    ids, wide = some_ids(16), StampedEngine(head_dim=64)
    ram = filled(ids, 3 * COST)
    root = root_of(wide.identity(SIZE, lambda path: ""))
    ram.keep(record_of(blocks_of(ids, root)[0], root), wide.expected(ids))
    assert (len(ram), ram.bytes) == (1, COST)


def test_a_chain_longer_than_the_tier_keeps_its_front() -> None:
    ids = some_ids(80)
    ram = filled(ids, 3 * COST)
    assert [block.name in ram for block in blocks_of(ids)] == [True] * 3 + [False] * 2


def test_the_chain_that_was_not_used_goes_from_its_end() -> None:
    one, other, third = (some_ids(32, seed=n) for n in (1, 2, 3))
    ram = filled(one, 4 * COST)
    ram.keep_chain(ROOT, blocks_of(other), ENGINE.expected(other), 0)
    ram.touch(blocks_of(one)[1].name)
    ram.keep(record_of(blocks_of(third)[0]), cut(ENGINE.expected(third), 0, 16))
    assert [block.name in ram for block in blocks_of(one)] == [True, True]
    assert [block.name in ram for block in blocks_of(other)] == [True, False]


def test_reading_a_chain_again_counts_as_a_use_of_what_is_here() -> None:
    one, other = some_ids(48, seed=1), some_ids(32, seed=2)
    ram = filled(one[:32], 4 * COST)
    ram.keep_chain(ROOT, blocks_of(other), ENGINE.expected(other), 0)
    ram.keep_chain(ROOT, blocks_of(one), ENGINE.expected(one), 0)
    assert [block.name in ram for block in blocks_of(one)] == [True, True, True]
    assert [block.name in ram for block in blocks_of(other)] == [True, False]


def test_keeping_a_block_that_is_here_counts_as_a_use_of_it() -> None:
    one, other, third = (some_ids(16, seed=n) for n in (1, 2, 3))
    ram = filled(one, 2 * COST)
    for ids in (other, one, third):
        ram.keep(record_of(blocks_of(ids)[0]), ENGINE.expected(ids))
    assert [blocks_of(ids)[0].name in ram for ids in (one, other, third)] == [True, False, True]


def test_no_memory_left_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(32)
    ram, blocks, rows = filled(ids[:16]), blocks_of(ids), ENGINE.expected(ids)

    def none_left(size: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ram.memory, "take", none_left)
        ram.keep(record_of(blocks[1]), cut(rows, 16, 32))
    assert (len(ram), ram.bytes) == (1, COST)
    ram.keep(record_of(blocks[1]), cut(rows, 16, 32))
    assert (len(ram), ram.bytes) == (2, 2 * COST)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(UsageError, match="-1 bytes"):
        Ram(-1)


def test_plain_memory_imports_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert len(filled(some_ids(32))) == 2
    assert Ram(1, pinned=True).memory.pinned is False, "asked for, and torch is not installed"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_pinned_memory_is_page_locked_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, at_once: bool
) -> None:
    asked: list[int] = []

    class Tensor:
        def __init__(self, size: int) -> None:
            asked.append(size)
            self.numpy = lambda: np.empty(size, np.uint8)

    fake = types.ModuleType("torch")
    fake.cuda = types.SimpleNamespace(is_available=lambda: gpu)  # type: ignore[attr-defined]
    fake.uint8 = None  # type: ignore[attr-defined]

    def empty(size: int, *, dtype: object, pin_memory: bool) -> Tensor:
        assert pin_memory
        return Tensor(size)

    fake.empty = empty  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", fake)
    ids = some_ids(16)
    engine = StampedEngine(head_dim=12)
    root = root_of(engine.identity(SIZE, lambda path: ""))
    ram = Ram(10**6, pinned=at_once)
    ram.pin()
    ram.keep(record_of(blocks_of(ids, root)[0], root), engine.expected(ids))
    plane = 2 * SIZE * 2 * 12 * 2
    assert asked == ([plane, plane] if gpu else [])
    assert ram.bytes == SIZE * 4 + 2 * (2048 if gpu else plane), "a power of two where page-locked"


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads take turns after a few steps, not after a few thousand."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("eager_threads")
def test_threads_never_see_wrong_rows_and_the_budget_holds() -> None:
    chains = [some_ids(64, seed=n) for n in range(6)]
    expected = [ENGINE.expected(ids) for ids in chains]
    ram = Ram(9 * COST)
    stop = threading.Event()

    def work(seed: int) -> int:
        wrong = 0
        for number in np.random.default_rng(seed).integers(0, len(chains), 150):
            blocks = blocks_of(chains[number])
            ram.keep_chain(ROOT, blocks, expected[number], 0)
            for block in blocks:
                rows = read(ram, block)
                right = cut(expected[number], block.start, block.start + SIZE)
                wrong += rows is not None and not equal(rows, right)
        return wrong

    def watch() -> int:
        most = 0
        while not stop.is_set():
            most = max(most, ram.bytes)
        return most

    with ThreadPoolExecutor(5) as pool:
        most = pool.submit(watch)
        try:
            assert list(pool.map(work, range(4))) == [0, 0, 0, 0]
        finally:
            stop.set()
    assert 0 < most.result() <= ram.capacity
    assert ram.bytes == len(ram) * COST
    assert ram.hits > 0
