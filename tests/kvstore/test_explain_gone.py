"""explain on what was stored once: evicted, damaged, missing, and of whom it can be known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvsnap.formats.identity import root_of
from kvsnap.formats.names import chain_names, token_array
from kvsnap.kvstore.explain.explain import Explanation, explain
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import cut, flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
IDS = some_ids(70)
"""Four blocks of 16 and a tail of 6."""


def explained(
    store: Store,
    ids: Sequence[int],
    name: str | None = None,
    *,
    check: bool = False,
    **engine: object,
) -> Explanation:
    return explain(Session(store, StampedEngine(**engine), name), ids, check=check)


def chain(ids: Sequence[int]) -> list[bytes]:
    """Names of the prompt's blocks."""
    root = root_of(StampedEngine().identity(16, str))
    return chain_names(root.key, token_array(ids), 16)


def in_block_order(store: Store) -> list[bytes]:
    return [name for (name,) in store.index.query("SELECT name FROM blocks ORDER BY start")]


@pytest.fixture
def evicted(store_path: Path) -> Iterator[Store]:
    """Session "chat", of whose four blocks the last ones went for another prompt's."""
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
        used = store.space.used()
    with Store(store_path, capacity=used + 6000) as store:
        turn(store, StampedEngine(), some_ids(32, seed=5))
        assert 2 < len(in_block_order(store)) < 6
        yield store


@pytest.mark.parametrize("name", [None, "chat"], ids=["prompt alone", "session"])
@pytest.mark.parametrize("length", [70, 62])
def test_an_evicted_block_is_known_by_the_session_that_names_it(
    evicted: Store, name: str | None, length: int
) -> None:
    chain = evicted.sessions.load("default", "chat").record.chain
    found = explained(evicted, IDS[:length], name)
    depth = found.matched_tokens // 16
    assert depth < 4
    assert (found.verdict, found.block) == ("evicted", chain[depth].hex())
    assert "session 'chat' shares" in found.text


def test_a_session_that_was_evicted_whole_is_told_from_one_never_stored(evicted: Store) -> None:
    gc(Store(evicted.path, capacity=evicted.space.used() // 8), dry_run=False)
    assert not evicted.index.query("SELECT 1 FROM blocks")
    found = explained(evicted, IDS)
    assert (found.verdict, found.matched_tokens) == ("evicted", 0)
    assert explained(evicted, some_ids(70, seed=8)).verdict == "nothing stored"


def test_a_session_of_another_identity_does_not_count_as_evicted(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(rotation_k=64), IDS, "chat")
        gc(Store(store_path, capacity=10), dry_run=False)
        assert not in_block_order(store)
        assert explained(store, IDS).verdict == "nothing stored"
        assert explained(store, IDS, rotation_k=64).verdict == "evicted"


def test_eviction_that_no_session_tells_of_is_the_end_of_the_chain(evicted: Store) -> None:
    evicted.sessions.remove("default", "chat")
    found = explained(evicted, IDS)
    assert found.verdict == "end of stored chain"
    assert found.matched_tokens in (16, 32, 48)


def test_another_session_that_parts_earlier_does_not_count_as_evicted(evicted: Store) -> None:
    other = [*IDS[:20], IDS[20] ^ 1, *some_ids(60, seed=2)]
    assert explained(evicted, other).verdict == "differing token"


@pytest.mark.parametrize("length", [70, 40])
def test_a_block_set_aside_by_an_earlier_resume_is_damaged_with_its_reason(
    open_store: Opener, length: int
) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS, "chat")
    name = in_block_order(store)[2]
    flip(store.place.block(name), -1)
    turn(store, StampedEngine(), IDS, save=False)
    for again in (store, open_store()):
        found = explained(again, IDS[:length])
        assert (found.verdict, found.matched_tokens, found.block) == ("damaged", 32, name.hex())
        assert "digest" in found.text
    # Behind the lost block nothing counts, though it is there.
    assert len(found.blocks) == 2


def test_a_lost_block_that_would_have_helped_less_is_not_the_reason(store: Store) -> None:
    turn(store, StampedEngine(), [*IDS[:20], 7, *IDS[21:32]])
    turn(store, StampedEngine(), IDS[:32])
    other = next(n for n in in_block_order(store)[1:] if n != chain(IDS)[1])
    store.place.block(other).unlink()
    store.blocks.set_aside(other, "the file is missing")
    found = explained(store, [*IDS[:28], 9, *IDS[29:40]])
    assert (found.verdict, found.matched_tokens) == ("differing token", 28)


def test_a_file_of_another_block_does_not_pass_a_check(store: Store) -> None:
    turn(store, StampedEngine(), IDS, codec="raw")
    names = in_block_order(store)
    store.place.block(names[1]).write_bytes(store.place.block(names[2]).read_bytes())
    found = explained(store, IDS, check=True)
    assert (found.verdict, found.matched_tokens) == ("damaged", 16)
    assert "another block's" in found.text


def test_a_missing_file_is_noticed_without_a_check_and_a_wrong_byte_with_one(
    store: Store,
) -> None:
    turn(store, StampedEngine(), IDS)
    names = in_block_order(store)
    flip(store.place.block(names[3]), -1)
    assert explained(store, IDS).matched_tokens == 64
    checked = explained(store, IDS, check=True)
    assert (checked.verdict, checked.matched_tokens, checked.block) == (
        "damaged", 48, names[3].hex(),
    )  # fmt: skip
    assert checked.checked
    store.place.block(names[1]).unlink()
    found = explained(store, IDS)
    assert (found.verdict, found.matched_tokens, found.block) == ("damaged", 16, names[1].hex())
    assert found.damage == (f"block {names[1].hex()[:12]}: the file is missing",)


def test_a_shortened_file_is_noticed_without_a_check(store: Store) -> None:
    turn(store, StampedEngine(), IDS)
    path = store.place.block(in_block_order(store)[2])
    cut(path, path.stat().st_size - 1)
    assert (explained(store, IDS).verdict, explained(store, IDS).matched_tokens) == ("damaged", 32)


def test_a_damaged_tail_costs_the_tail_and_is_told(store: Store) -> None:
    turn(store, StampedEngine(), IDS, "chat", codec="raw")
    flip(store.sessions.path("default", "chat"), -1)
    found = explained(store, [*IDS, 1, 2, 3], "chat")
    assert (found.verdict, found.matched_tokens, found.tail_tokens) == ("damaged", 64, 0)
    assert found.text.startswith("tail of session 'chat': ")
