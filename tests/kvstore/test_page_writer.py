"""Blocks of a serving engine on their way to the store: in order, bounded, never raised to the engine."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import StoreError, StoreFull, StoreReadOnly
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.layout import Array, Group, Layout, Plane
from kvsnap.formats.names import ZERO_PARENT, block_name, token_array
from kvsnap.formats.sealed import is_sealed
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.page_writer import Batch, PageWriter
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted
from kvsnap.testing.stamped import StampedEngine

ROW, SIZE = 1000, 4
"""Bytes of a layer's page, tokens of a block."""
PLANE = Plane(name="kv", kind="pages", dtype="U8", row=(ROW,), source_type="uint8")
LAYOUT = Layout(groups=(Group(name="g0", layers=2, planes=(PLANE,)),))


def root(tenant: Tenant | None = None) -> Root:
    whole = StampedEngine().identity(SIZE, lambda path: "")
    return root_of(dataclasses.replace(whole, layout=LAYOUT), tenant)


def chain(own: Root, blocks: int, first: int = 0) -> list[Wanted]:
    found, parent = list[Wanted](), ZERO_PARENT
    for number in range(blocks):
        ids = token_array([first + number * SIZE + place for place in range(SIZE)])
        name = block_name(own.key, parent, ids)
        found.append(Wanted(name, parent, number * SIZE, ids))
        parent = name
    return found


def rows(blocks: Sequence[Wanted]) -> list[dict[str, Array]]:
    return [
        {"g0.kv": np.full((2, ROW), int(block.token_ids[0]) % 256, np.uint8)} for block in blocks
    ]


def batch(own: Root, blocks: Sequence[Wanted], **more: Sequence[bytes]) -> Batch:
    return Batch(own, blocks, LAYOUT, lambda: rows(blocks), 2 * ROW * len(blocks), **more)


def read(store: Store, own: Root, block: Wanted) -> np.ndarray:
    out = {"g0.kv": np.zeros((2, ROW), np.uint8)}
    store.blocks.read_into(own, block, LAYOUT, out, slice(0, SIZE))
    return out["g0.kv"]


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with Store(store_path) as opened:
        yield opened


@pytest.fixture
def writer(store: Store) -> Iterator[PageWriter]:
    made = PageWriter(store, get_codec("raw"), 10 * 2 * ROW)
    yield made
    made.close()


class Held:
    """Rows that come only when they are let go: the thread waits meanwhile."""

    def __init__(self, blocks: Sequence[Wanted]) -> None:
        self.blocks, self.begun, self.go = blocks, threading.Event(), threading.Event()

    def __call__(self) -> list[dict[str, Array]]:
        self.begun.set()
        assert self.go.wait(30)
        return rows(self.blocks)


def test_what_was_added_is_stored_in_order_and_right(store: Store, writer: PageWriter) -> None:
    own, blocks = root(), chain(root(), 6)
    writer.add(batch(own, blocks[:2]))
    writer.add(batch(own, blocks[2:]))
    writer.flush()
    for block, right in zip(blocks, rows(blocks), strict=True):
        assert store.blocks.has(block.name)
        assert np.array_equal(read(store, own, block), right["g0.kv"])
    counts = writer.take_counts()
    assert counts["written"] == 6
    sizes = [store.place.block(block.name).stat().st_size for block in blocks]
    assert counts["written_bytes"] == sum(sizes)
    assert writer.take_counts() == {}


def test_what_is_there_is_not_written_again(store: Store, writer: PageWriter) -> None:
    own, blocks = root(), chain(root(), 2)
    for _ in range(2):
        writer.add(batch(own, blocks))
    writer.flush()
    assert writer.take_counts()["written"] == 2


def test_what_waits_is_known_and_bounded(store: Store, writer: PageWriter) -> None:
    own, blocks = root(), chain(root(), 8)
    held = Held(blocks)
    assert writer.room_for(10 * 2 * ROW)
    writer.add(Batch(own, blocks, LAYOUT, held, 8 * 2 * ROW))
    assert held.begun.wait(30)
    assert writer.is_waiting(blocks[7].name)
    assert not writer.is_waiting(ZERO_PARENT)
    assert writer.room_for(2 * 2 * ROW)
    assert not writer.room_for(2 * 2 * ROW + 1)
    held.go.set()
    writer.flush()
    assert not writer.is_waiting(blocks[7].name)
    assert writer.room_for(10 * 2 * ROW)


def test_a_block_that_waits_twice_waits_until_both_are_done(
    store: Store, writer: PageWriter
) -> None:
    own, blocks = root(), chain(root(), 1)
    first, second = Held(blocks), Held(blocks)
    for rows_of in (first, second):
        writer.add(Batch(own, blocks, LAYOUT, rows_of, 2 * ROW))
    first.go.set()
    assert second.begun.wait(30)
    assert writer.is_waiting(blocks[0].name)
    second.go.set()
    writer.flush()
    assert not writer.is_waiting(blocks[0].name)


def test_a_block_whose_parent_was_dropped_is_dropped(store: Store, writer: PageWriter) -> None:
    own, blocks = root(), chain(root(), 4)
    writer.add(batch(own, blocks[:1]))
    writer.drop(1)
    writer.add(batch(own, blocks[2:]))
    writer.flush()
    assert [store.blocks.has(block.name) for block in blocks] == [True, False, False, False]
    assert writer.take_counts()["dropped"] == 3
    writer.add(batch(own, blocks[1:]))  # as soon as somebody has them all
    writer.flush()
    assert all(store.blocks.has(block.name) for block in blocks)


def test_what_goes_wrong_is_said_once_a_kind_and_raised_never(
    store: Store,
    writer: PageWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, errors = root(), [StoreFull("full", "free some"), OSError("device"), StoreReadOnly("no")]

    def put(*args: object) -> int:
        raise errors[0]

    monkeypatch.setattr(store.blocks, "put", put)
    with caplog.at_level(logging.WARNING, logger="kvsnap"):
        while errors:
            for number in range(3):
                writer.add(batch(own, chain(own, 2, 100 * number)))
                writer.flush()
            errors.pop(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR", "ERROR"]
    assert "(free some)" in caplog.messages[0]
    assert writer.take_counts() == {"dropped": 3 * 3 * 2}
    assert writer.room_for(10 * 2 * ROW)


def test_a_store_error_before_the_first_block_is_no_end(
    store: Store, writer: PageWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, blocks = root(), chain(root(), 2)
    with monkeypatch.context() as patch:
        patch.setattr(store.holds, "lease", lambda: (_ for _ in ()).throw(StoreError("no index")))
        writer.add(batch(own, blocks))
        writer.flush()
    assert not store.blocks.has(blocks[0].name)
    writer.add(batch(own, blocks))
    writer.flush()
    assert store.blocks.has(blocks[1].name)


def test_rows_that_cannot_be_fetched_free_their_room(store: Store, writer: PageWriter) -> None:
    own, blocks = root(), chain(root(), 2)

    def gone() -> list[dict[str, Array]]:
        raise MemoryError

    writer.add(Batch(own, blocks, LAYOUT, gone, 4 * ROW))
    writer.flush()
    assert writer.room_for(10 * 2 * ROW)
    assert not writer.is_waiting(blocks[0].name)
    assert writer.take_counts() == {"dropped": 2}


def test_a_full_store_keeps_below_its_capacity(store_path: Path) -> None:
    with Store(store_path, capacity=30_000) as store:
        writer = PageWriter(store, get_codec("raw"), 10**6)
        own = root()
        for number in range(20):
            writer.add(batch(own, chain(own, 3, 100 * number)))
        writer.close()
        used = sum(path.stat().st_size for path in store.place.blocks.rglob("*.safetensors"))
        assert 0 < used <= 30_000
        last = chain(own, 3, 1900)
        assert all(store.blocks.has(block.name) for block in last)


def test_closing_writes_what_waits(store: Store) -> None:
    writer = PageWriter(store, get_codec("zstd"), 10**6)
    own, blocks = root(), chain(root(), 30)
    for block in blocks:
        writer.add(batch(own, [block]))
    writer.close()
    assert all(store.blocks.has(block.name) for block in blocks)


def test_an_encrypted_store_has_sealed_files_only(store_path: Path) -> None:
    tenant = Tenant(bytes(range(100, 132)))
    own = root(tenant)
    blocks = chain(own, 3)
    with Store(store_path, encrypt=True) as store:
        store.keys.add(tenant)
        writer = PageWriter(store, get_codec("raw"), 10**6)
        writer.add(batch(own, blocks))
        writer.close()
        assert writer.take_counts()["written"] == 3
        assert np.array_equal(read(store, own, blocks[2]), rows(blocks)[2]["g0.kv"])
    for block in blocks:
        data = store.place.block(block.name).read_bytes()
        assert is_sealed(memoryview(data))
        assert bytes([int(block.token_ids[0])]) * ROW not in data
