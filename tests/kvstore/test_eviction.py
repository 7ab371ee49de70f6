"""Which blocks go, and when: least recently used leaves first, within the budget at all times."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvsnap.formats.errors import NotAllStored, StoreFull
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.calls import watching
from kvsnap.testing.recount import assert_closed, assert_counts, disk_bytes, stored_blocks
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import Turn, some_ids, turn

SIZE = 16
BYTES = 3712
"""Of each block file here, uncompressed."""
Opened = Callable[..., Store]


def put(store: Store, blocks: int, seed: int, name: str | None = None, **engine: Any) -> Turn:
    return turn(store, StampedEngine(**engine), some_ids(blocks * SIZE, seed), name, codec="raw")


def left(store: Store, blocks: int, seed: int, **engine: Any) -> int:
    """How many blocks of a chain are there, from the front; asking touches nothing."""
    session = Session(store, StampedEngine(**engine), codec="raw")
    session.engine.evaluate(some_ids(blocks * SIZE, seed))  # type: ignore[attr-defined]
    wanted = session._writer.chain()
    return sum(store.index.is_reachable(block.name) for block in wanted)


def test_the_end_of_the_oldest_chain_goes_first_every_time(opened: Opened, tmp_path: Path) -> None:
    # A43: not the head, which would strand all that follows.
    for number in range(50):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "kvsnap.json").write_text('{"block_size": 16, "created": 1, "format": "1"}')
        store = opened(3, path=path)
        put(store, 3, seed=2 * number)
        put(store, 1, seed=2 * number + 1)
        assert left(store, 3, seed=2 * number) == 2
        assert left(store, 1, seed=2 * number + 1) == 1
        assert_closed(store)


def test_a_shared_block_stays_as_long_as_one_that_follows_it(opened: Opened) -> None:
    # A43: A→B, A→C
    store = opened(3)
    shared, engine = some_ids(SIZE, 0), StampedEngine()
    for seed in (1, 2):
        turn(store, engine, [*shared, *some_ids(SIZE, seed)], codec="raw")
    put(store, 1, seed=3)
    assert left(store, 1, seed=0) == 1
    put(store, 1, seed=4)
    put(store, 1, seed=5)
    assert left(store, 1, seed=0) == 0, "with its children gone it is as old as they were"
    assert_closed(store)


def test_of_a_chain_with_equal_times_the_end_goes_first(opened: Opened) -> None:
    # A43
    store = opened(4)
    put(store, 4, seed=1)
    with store.index.transaction() as db:
        db.execute("UPDATE blocks SET used = -1")
    for seed in range(2, 5):
        put(store, 1, seed=seed)
        assert_closed(store)
    assert left(store, 4, seed=1) == 1


def test_a_look_up_makes_a_chain_the_last_to_go(opened: Opened) -> None:
    store = opened(4)
    put(store, 2, seed=1)
    put(store, 2, seed=2)
    turn(store, StampedEngine(), some_ids(2 * SIZE + 1, 1), save=False)
    put(store, 2, seed=3)
    assert (left(store, 2, 1), left(store, 2, 2), left(store, 2, 3)) == (2, 0, 2)


def test_a_block_that_was_lost_and_stored_again_is_the_newest_again(opened: Opened) -> None:
    # A44: the newest entry must not have the lowest score.
    store = opened(3)
    put(store, 1, seed=1)
    put(store, 1, seed=2)
    put(store, 1, seed=3)
    ((name,),) = store.index.query("SELECT name FROM blocks ORDER BY id LIMIT 1")
    store.place.block(name).unlink()
    put(store, 1, seed=1)
    put(store, 1, seed=4)
    assert (left(store, 1, seed=1), left(store, 1, seed=2)) == (1, 0)


def test_one_more_block_in_a_full_store_is_one_write_and_one_unlink(opened: Opened) -> None:
    # A44
    store = opened(4)
    for seed in range(4):
        put(store, 1, seed=seed)
    with watching(store.path) as calls:
        put(store, 1, seed=9)
    files = [call.split() for call in calls.made if ".safetensors" in call]
    renamed = [path for name, path in files if name in ("rename", "replace")]
    gone = [path for name, path in files if name == "unlink"]
    assert len(gone) == 1
    assert not set(gone) & set(renamed)
    assert len([call for call in calls.made if call.startswith("rename") or "replace" in call]) == 1
    with watching(store.path) as calls:
        put(store, 1, seed=9)
    assert not [call for call in calls.made if call.split()[0] in ("rename", "replace", "unlink")]


def test_a_save_does_not_evict_the_blocks_that_it_would_have_to_write_again(
    opened: Opened,
) -> None:
    # A44: a resume leaves the last token to compute, and so does not touch the last block.
    store = opened(50)
    put(store, 3, seed=1)
    put(store, 3, seed=2)
    full = Store(store.path, capacity=disk_bytes(store.place) + 100, min_free="0")
    with full:
        done = put(full, 3, 1, "chat")
    assert done.saved is not None
    assert done.saved.blocks_written == 0
    assert left(store, 3, seed=1) == 3
    assert left(store, 3, seed=2) < 3


def test_a_file_larger_than_the_capacity_is_refused_before_anything_is_written(
    opened: Opened,
) -> None:
    # A44, A51
    put(opened(4), 3, seed=1)
    store = opened(0.99)
    with watching(store.path) as calls, pytest.raises(StoreFull, match="more than the store's"):
        put(store, 1, seed=2)
    assert not [call for call in calls.made if ".part" in call or call.startswith("unlink")]
    assert left(store, 3, seed=1) == 3


def test_nothing_is_evicted_for_a_write_that_fails_anyhow(opened: Opened) -> None:
    store = opened(10)
    put(store, 6, seed=1)
    put(store, 3, seed=2)
    with store.holds.lease() as lease:
        ((deepest,),) = store.index.query("SELECT name FROM blocks WHERE start = 80")
        assert lease.keep(deepest)
        with pytest.raises(StoreFull, match="pinned, in use or in sessions"):
            put(opened(6.5), 1, seed=3)
    assert (left(store, 6, seed=1), left(store, 3, seed=2)) == (6, 3)


@contextlib.contextmanager
def largest_ever(store: Store) -> Iterator[list[int]]:
    """What the store takes after each call that writes, renames or deletes."""
    seen: list[int] = []
    with contextlib.ExitStack() as stack:
        for name in ("write", "rename", "replace", "unlink"):
            call = _measured(getattr(os, name), store, seen)
            stack.enter_context(mock.patch.object(os, name, call))
        yield seen


def _measured(real: Callable[..., Any], store: Store, seen: list[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        seen.append(disk_bytes(store.place))
        return result

    return call


@pytest.mark.parametrize("name", [None, "chat"])
def test_the_budget_holds_at_all_times_for_all_models_together(
    opened: Opened, name: str | None
) -> None:
    # A45
    store = opened(11)
    foreign = store.path / "blocks" / "notes.txt"
    with largest_ever(store) as seen:
        put(store, 8, seed=1, name=name)
        foreign.write_text("")
        put(store, 8, seed=1, weights="another model", name=f"{name} 2" if name else None)
    assert max(seen) <= 11 * BYTES
    assert left(store, 8, seed=1, weights="another model") == 8
    assert 1 <= left(store, 8, seed=1) <= 3, "those of the first model go, from the end"
    assert foreign.exists()
    assert_closed(store)
    assert_counts(store)


@pytest.mark.parametrize("index", ["kept", "deleted"])
def test_usage_is_right_after_a_restart(opened: Opened, index: str) -> None:
    # A46: fill to 9/10, die, start again, put 2.
    store = opened(10)
    put(store, 9, seed=1)
    store.index.close()
    store.owner.forget()
    if index == "deleted":
        for file in store.path.glob("index.sqlite3*"):
            file.unlink()
    store = opened(10)
    assert store.space.used() == disk_bytes(store.place) == 9 * BYTES
    put(store, 2, seed=2)
    assert disk_bytes(store.place) == 10 * BYTES
    assert (left(store, 9, seed=1), left(store, 2, seed=2)) == (8, 2)
    assert_counts(store)


def test_a_session_whose_blocks_went_is_listed_and_resumes_with_the_rest_computed(
    opened: Opened,
) -> None:
    ids = some_ids(7 * SIZE + 5, 1)
    store = opened(9)
    turn(store, StampedEngine(), ids, "chat", codec="raw")
    put(store, 4, seed=2)
    (entry,) = store.listing
    assert (entry.facts.tokens, entry.facts.blocks) == (len(ids), 7)
    kept = entry.stored_blocks
    assert 0 < kept < 7
    session = Session(store, StampedEngine(), "chat")
    assert session.stored_token_ids().tolist() == ids.tolist()
    done = turn(store, StampedEngine(), ids, "chat", codec="raw")
    assert (done.resumed.reused_tokens, done.computed) == (kept * SIZE, len(ids) - kept * SIZE)
    assert done.resumed.damage == ()
    assert done.saved is not None
    assert done.saved.blocks_written == 7 - kept
    (entry,) = store.listing
    assert entry.stored_blocks == 7
    report = verify_store(store)
    assert (report.bad, report.unreachable) == ([], [])


def test_a_conversation_larger_than_the_store_is_saved_with_the_blocks_that_fit(
    opened: Opened,
) -> None:
    store, engine = opened(5), StampedEngine()
    with pytest.raises(NotAllStored) as caught:
        turn(store, engine, some_ids(9 * SIZE, 1), "chat", codec="raw")
    stored = caught.value.report.blocks_stored  # type: ignore[attr-defined]
    assert 0 < stored < 9
    fresh = StampedEngine()
    again = turn(opened(50), fresh, some_ids(9 * SIZE, 1), "chat", codec="raw")
    assert again.resumed.reused_tokens == stored * SIZE
    fresh.check_rows()
    assert again.saved is not None
    assert again.saved.blocks_stored == 9


def test_a_block_that_was_removed_by_hand_counts_as_gone_when_its_turn_comes(
    opened: Opened,
) -> None:
    # A39
    store = opened(3)
    put(store, 1, seed=1)
    put(store, 2, seed=2)
    ((name,),) = store.index.query("SELECT name FROM blocks ORDER BY id LIMIT 1")
    store.place.block(name).unlink()
    put(store, 1, seed=3)
    assert (left(store, 2, seed=2), left(store, 1, seed=3)) == (2, 1)
    assert_counts(store)


def test_one_file_that_cannot_be_deleted_does_not_keep_the_others(opened: Opened) -> None:
    store = opened(4)
    put(store, 1, seed=1)
    put(store, 3, seed=2)
    ((name,),) = store.index.query("SELECT name FROM blocks ORDER BY id LIMIT 1")
    stubborn, unlink = str(store.place.block(name)), os.unlink

    def refuse(path: Any, **options: Any) -> None:
        if os.fspath(path) == stubborn:
            raise PermissionError(1, "not permitted")
        unlink(path, **options)

    with mock.patch.object(os, "unlink", refuse):
        put(store, 1, seed=3)
        assert disk_bytes(store.place) <= 4 * BYTES
        assert store.space.used() == disk_bytes(store.place)
    assert left(store, 1, seed=3) == 1
    assert {name} < set(stored_blocks(store.place))
