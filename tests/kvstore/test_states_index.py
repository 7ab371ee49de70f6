"""State checkpoints among blocks: in the index, under eviction, in verify and gc."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.block import STATE, pack_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.names import ZERO_PARENT, TokenIds, chain_names
from kvsnap.kvstore.explain.dry_match import Found
from kvsnap.kvstore.explain.gone import lost_next
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.match import Match, deepest_state, longest_prefix
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.kvstore.wanted import Miss, Wanted
from kvsnap.testing.by_hand import (
    LAYOUT,
    ROOT,
    SIZE,
    blocks_of,
    noise,
    put,
    put_all,
    state_at,
    touch,
)
from kvsnap.testing.faults import flip
from kvsnap.testing.recount import assert_closed, assert_counts, stored_blocks
from kvsnap.testing.turns import some_ids

IDS = some_ids(70)
"""Four blocks of 16 and six more."""
OTHER = np.concatenate([IDS[:40], some_ids(30, seed=1)])
"""Parts from it in the third block."""
STATES = (5, 32, 40, 69)
Opener = Callable[[], Store]


def places(store: Store, parents: Sequence[bytes]) -> list[int]:
    """The positions of the checkpoints that the index offers."""
    found = store.index.states(ROOT.root_id, parents, IDS)
    return [row.start + len(row.tokens) // 4 for row in found]


def search(store: Store, ids: TokenIds, limit: int | None = None) -> Match:
    names = chain_names(ROOT.key, ids, SIZE)
    most = len(ids) - 1 if limit is None else limit
    return deepest_state(store.blocks, ROOT, names, ids, SIZE, most)


def shape(store: Store) -> list[tuple[object, ...]]:
    """The rows, but for the times and numbers that a rebuild sets anew."""
    return store.index.query(
        "SELECT b.name, b.state, b.start, b.tokens, b.bytes, b.codec, b.children, b.chain_bytes,"
        " b.reachable, b.lost, p.name FROM blocks b LEFT JOIN blocks p ON p.id = b.parent"
        " ORDER BY b.name"
    )


def without_index(open_store: Opener, store_path: Path) -> Store:
    for path in store_path.glob("index.sqlite3*"):
        path.unlink()
    return open_store()


def names_of(wanted: Sequence[Wanted]) -> list[bytes]:
    return [each.name for each in wanted]


def test_a_rebuild_from_files_keeps_states_as_states(open_store: Opener, store_path: Path) -> None:
    store = open_store()
    put_all(store, IDS, STATES)
    put_all(store, OTHER, STATES)
    before = shape(store)
    assert sum(bool(row[1]) for row in before) == 5  # those at 5, 32 and 40 are of both
    again = without_index(open_store, store_path)
    assert shape(again) == before
    assert_closed(again)
    assert_counts(again)
    parents = [ZERO_PARENT, *chain_names(ROOT.key, IDS, SIZE)]
    assert places(again, parents) == [69, 40, 32, 5]
    assert search(again, IDS).tokens == 69


def test_states_are_offered_deepest_first_and_only_those_on_the_blocks_asked_for(
    store: Store,
) -> None:
    put_all(store, IDS, (3, 5, 16, 17, 31, 64, 65, 69))
    names = chain_names(ROOT.key, IDS, SIZE)
    assert places(store, [ZERO_PARENT, *names]) == [69, 65, 64, 31, 17, 16, 5, 3]
    assert places(store, [ZERO_PARENT]) == [5, 3]
    assert places(store, names[:1]) == [31, 17, 16]
    assert places(store, []) == []
    assert store.index.states("00" * 32, [ZERO_PARENT, *names], IDS) == []


@pytest.mark.parametrize("rebuilt", [True, False], ids=["rebuilt", "set aside"])
def test_a_state_whose_parent_is_missing_waits_until_it_is_back(
    open_store: Opener, store_path: Path, rebuilt: bool
) -> None:
    store = open_store()
    put_all(store, IDS, STATES)
    blocks = blocks_of(IDS)
    store.place.block(blocks[1].name).unlink()
    if rebuilt:
        store = without_index(open_store, store_path)
    else:
        store.blocks.set_aside(blocks[1].name, "the file is missing")
    names = chain_names(ROOT.key, IDS, SIZE)
    assert places(store, [ZERO_PARENT, *names]) == [5]
    assert search(store, IDS).tokens == 5
    waiting = {state_at(IDS, at).name.hex() for at in (32, 40, 69)}
    assert waiting <= set(verify_store(store).unreachable)
    put(store, blocks[1])
    assert places(store, [ZERO_PARENT, *names]) == [69, 40, 32, 5]
    assert search(store, IDS).tokens == 69
    assert_closed(store)
    assert_counts(store)


def test_neighbours_never_return_a_state(store: Store) -> None:
    put_all(store, IDS, (5, 16, 17, 20, 31, 32, 40))
    blocks = blocks_of(IDS)
    for block in blocks:
        asked = [block.token_ids, block.token_ids[:4], IDS[:0], block.token_ids + np.uint32(1)]
        for ids in asked:
            found = store.index.neighbours(ROOT.root_id, block.parent, big_endian(ids))
            assert {row.name for row in found} <= {block.name}
    # The tokens of a checkpoint, and no block that shares them.
    ids = np.concatenate([IDS[:40], some_ids(30, seed=9)])
    alone = store.index.neighbours(ROOT.root_id, blocks[3].name, big_endian(IDS[64:69]))
    assert alone == []
    names = chain_names(ROOT.key, ids, SIZE)
    match = longest_prefix(store.blocks, ROOT, names, ids, SIZE, 69)
    assert all(not wanted.extras for wanted in match.blocks)


def test_a_search_takes_the_deepest_state_whose_tokens_the_prompt_has(store: Store) -> None:
    put_all(store, IDS, (5, 16, 37, 40, 69))
    put(store, state_at(OTHER, 43))
    assert [search(store, IDS, limit).tokens for limit in (69, 68, 40, 39, 36, 15, 4, 0)] == [
        69, 40, 40, 37, 16, 5, 0, 0,
    ]  # fmt: skip
    assert search(store, OTHER).tokens == 43
    assert search(store, some_ids(70, seed=4)).tokens == 0
    match = search(store, IDS, 39)
    assert match.state is not None
    assert (match.state.start, match.state.parent) == (32, blocks_of(IDS)[1].name)
    assert names_of(match.blocks) == names_of(blocks_of(IDS)[:2])
    assert match.beyond == 32
    assert (search(store, IDS, 68).tokens, search(store, IDS, 68).beyond) == (40, 64)


@pytest.mark.parametrize("position", [5, 32, 40, 69])
def test_a_state_comes_back_as_it_was_stored(store: Store, position: int) -> None:
    put_all(store, IDS, STATES)
    wanted = state_at(IDS, position)
    rows = store.blocks.read_state(ROOT, wanted, LAYOUT)
    assert rows.keys() == LAYOUT.planes().keys()
    for name, array in noise(wanted).items():
        assert np.array_equal(rows[name], array)
    assert rows["window.k"].shape[1] == min(20, position)


def test_a_state_is_not_read_as_a_block_nor_a_block_as_a_state(store: Store) -> None:
    put_all(store, IDS, STATES)
    state, block = state_at(IDS, 40), blocks_of(IDS)[1]
    as_block = Wanted(state.name, state.parent, state.start, state.token_ids)
    out = LAYOUT.in_blocks.empty(8)
    with pytest.raises(Miss):
        store.blocks.read_into(ROOT, as_block, LAYOUT.in_blocks, out, slice(0, 8))
    as_state = Wanted(block.name, block.parent, block.start, block.token_ids, STATE)
    with pytest.raises(Miss):
        store.blocks.read_state(ROOT, as_state, LAYOUT)


def test_a_state_file_of_another_place_is_not_used(store: Store) -> None:
    # Signed rightly, under its own name; only its position is another one than its parent's end.
    ids = np.full(70, 7, np.uint32)  # the prompt goes on with the same tokens anywhere
    put(store, *blocks_of(ids))
    right = state_at(ids, 40)
    moved = Wanted(right.name, right.parent, right.start + 5, right.token_ids, STATE)
    file = pack_block(moved.record(ROOT), get_codec("raw"), LAYOUT, noise(moved))
    path = store.place.block(right.name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(bytes(memoryview(part)) for part in file.buffers))
    gc(store)
    match = search(store, ids)
    assert match.state is not None
    assert (match.tokens, match.state.start) == (40, 32)
    with pytest.raises(Miss, match="another place in a chain"):
        store.blocks.read_state(ROOT, match.state, LAYOUT)
    assert search(store, ids).tokens == 0


@pytest.mark.parametrize("offset", [-1, -200, 9, 700])
def test_a_flipped_byte_in_a_state_is_found_and_costs_only_the_state(
    store: Store, offset: int
) -> None:
    put_all(store, IDS, STATES)
    wanted = state_at(IDS, 69)
    flip(store.place.block(wanted.name), offset)
    report = verify_store(store)
    assert [bad.name for bad in report.bad] == [wanted.name.hex()]
    assert report.checked == 8
    with pytest.raises(Miss):
        store.blocks.read_state(ROOT, wanted, LAYOUT)
    assert not store.place.block(wanted.name).exists()
    match = search(store, IDS)
    assert (match.tokens, match.beyond) == (40, 64)
    found = Found(ROOT, 40, match.blocks, 0, chain_names(ROOT.key, IDS, SIZE), ())
    lost = lost_next(store, ROOT, IDS, found)
    assert lost is not None
    assert lost.block == wanted.name.hex()
    put(store, wanted)
    assert search(store, IDS).tokens == 69
    assert lost_next(store, ROOT, IDS, found) is None
    assert verify_store(store).bad == []


def test_verify_knows_a_state_by_its_name(store: Store) -> None:
    put_all(store, IDS, STATES)
    first, second = (store.place.block(state_at(IDS, at).name) for at in (40, 69))
    second.write_bytes(first.read_bytes())
    (bad,) = verify_store(store).bad
    assert "the file holds block" in bad.reason


@pytest.mark.parametrize("parent_too", [False, True])
def test_gc_adopts_a_state_file_without_a_row(store: Store, parent_too: bool) -> None:
    put_all(store, IDS, STATES)
    before = shape(store)
    with store.index.transaction() as db:
        db.execute("DELETE FROM blocks WHERE state = 1")
        if parent_too:
            db.execute("DELETE FROM blocks WHERE children = 0")
    report = gc(store)
    assert (report.adopted, report.evicted) == (5 if parent_too else 4, 0)
    assert shape(store) == before
    assert search(store, IDS).tokens == 69
    assert_closed(store)
    assert_counts(store)


def test_a_state_that_gc_adopts_before_its_parent_is_there_waits_for_it(store: Store) -> None:
    put_all(store, IDS, STATES)
    put(store, *blocks_of(OTHER))
    blocks = blocks_of(IDS)
    with store.index.transaction() as db:
        for name in [state_at(IDS, 69).name, blocks[3].name]:
            db.execute("DELETE FROM blocks WHERE name = ?", (name,))
    path = store.place.block(blocks[3].name)
    path.unlink()
    assert gc(store).adopted == 1
    assert search(store, IDS).tokens == 40
    row = store.index.find(state_at(IDS, 69).name)
    assert row is not None
    assert not row.reachable
    put(store, blocks[3])
    assert search(store, IDS).tokens == 69
    assert_counts(store)


@pytest.mark.parametrize("used", [None, 5, 40, 69])
def test_eviction_takes_states_as_leaves_and_no_block_under_one_that_stays(
    store: Store, used: int | None
) -> None:
    put_all(store, IDS, STATES)
    put_all(store, OTHER, (50,))
    if used is not None:
        touch(store, state_at(IDS, used))
    parents = {row[0]: row[-1] for row in shape(store)}
    order = [victim.name for victim in store.space.eviction.plan(10**9).blocks]
    assert set(order) == parents.keys()
    for number, name in enumerate(order):
        later = order[number + 1 :]
        assert all(parents[other] != name for other in later), "a child outlived its parent"
    if used is not None:
        kept = order.index(state_at(IDS, used).name)
        assert all(
            order.index(state_at(IDS, at).name) < kept for at in (5, 32, 40, 69) if at != used
        )


def test_room_is_made_state_by_state_and_the_store_stays_closed(
    store_path: Path, open_store: Opener
) -> None:
    put_all(open_store(), IDS, STATES)
    left = len(stored_blocks(open_store().place))
    while left:
        with Store(store_path, min_free="0") as whole:
            used = whole.space.used()
        with Store(store_path, capacity=used - 1, min_free="0") as store:
            assert gc(store).evicted == 1
            assert_closed(store)
            assert_counts(store)
            there = stored_blocks(store.place)
            assert len(there) == left - 1
            left = len(there)
            match = search(store, IDS)
            for wanted in [*match.blocks, *([match.state] if match.state else [])]:
                assert wanted.name in there


def test_a_pinned_state_keeps_all_before_it(store_path: Path, open_store: Opener) -> None:
    store = open_store()
    put_all(store, IDS, STATES)
    put_all(store, OTHER, (50,))
    store.pins.pin_block(state_at(IDS, 40).name)
    with Store(store_path, capacity=1, min_free="0") as small:
        gc(small)
        kept = {state_at(IDS, 40).name, *names_of(blocks_of(IDS)[:2])}
        assert stored_blocks(small.place).keys() == kept


def test_a_row_of_a_state_that_cannot_be_one_is_damage(store: Store) -> None:
    put_all(store, IDS, STATES)
    with store.index.transaction() as db:
        db.execute("UPDATE blocks SET tokens = 7 WHERE state = 1")
    found = store.index.find(state_at(IDS, 5).name)
    assert found is not None
    assert found.tokens == big_endian(IDS[:5]), "the index is built anew"


def test_verify_finds_a_row_that_takes_a_state_for_a_block(store: Store) -> None:
    put_all(store, IDS, STATES)
    with store.index.transaction() as db:
        db.execute("UPDATE blocks SET state = 0 WHERE state = 1")
    reasons = {bad.reason for bad in verify_store(store).bad}
    assert len(reasons) == 1
    assert "the index differs from the file" in reasons.pop()
