"""Pages by their hashes: which block each is, and how it is found where SGLang says little of its place."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from kvsnap.engines.sglang_chain import MOST_KNOWN, WORDS, Places, block_of, chain_of, is_page_hash
from kvsnap.formats.extras import PAGE_HASH
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.kvstore.wanted import Wanted

ROOT = b"r" * 32


def page_hashes(count: int, seed: str = "a") -> list[str]:
    return [hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(count)]


class Shelf:
    """What is stored, and what was asked of it."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.asked = 0

    def put(self, blocks: Sequence[Wanted]) -> None:
        self.names |= {block.name for block in blocks}

    def __call__(self, names: Sequence[bytes]) -> set[bytes]:
        self.asked += len(names)
        return self.names & set(names)


def names(blocks: Sequence[Wanted]) -> list[bytes]:
    """A name says all: it follows from parent and words."""
    return [block.name for block in blocks]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_a_chain_goes_on_from_its_prefix_and_counts_words(shelf: Shelf) -> None:
    keys = page_hashes(5)
    whole = Places(ROOT, shelf).to_store([], keys)
    parts = Places(ROOT, shelf)
    assert names([*parts.to_store([], keys[:2]), *parts.to_store(keys[:2], keys[2:])]) == names(
        whole
    )
    again = Places(ROOT, shelf).to_store(keys[:3], keys[3:])
    assert names(again) == names(whole[3:]), "in a new process, too"
    assert [block.start for block in whole] == [0, 8, 16, 24, 32]
    assert whole[0].parent == ZERO_PARENT
    assert [block.parent for block in whole[1:]] == [block.name for block in whole[:-1]]
    assert {block.extras for block in whole} == {PAGE_HASH}
    assert b"".join(int(w).to_bytes(4, "little") for w in whole[1].token_ids).hex() == keys[1]
    assert len(whole[0].token_ids) == WORDS


def test_another_root_gives_other_names(shelf: Shelf) -> None:
    keys = page_hashes(3)
    ours = {block.name for block in Places(ROOT, shelf).to_store([], keys)}
    theirs = {block.name for block in Places(b"s" * 32, shelf).to_store([], keys)}
    assert not ours & theirs


def test_a_new_process_finds_as_much_as_is_stored(shelf: Shelf) -> None:
    keys = page_hashes(100)
    shelf.put(Places(ROOT, shelf).to_store([], keys)[:70])
    found = Places(ROOT, shelf).find(None, keys)
    assert len(found) == 70
    assert shelf.asked < 40, "by galloping, not by walking"
    assert Places(ROOT, shelf).find(None, page_hashes(3, "b")) == []


def test_pages_behind_a_prefix_are_found_where_it_is_given_in_full(shelf: Shelf) -> None:
    keys = page_hashes(10)
    shelf.put(Places(ROOT, shelf).to_store([], keys))
    assert len(Places(ROOT, shelf).find(keys[:4], keys[4:])) == 6


@pytest.mark.parametrize("told", [None, 2], ids=["nothing", "the front"])
def test_pages_are_found_behind_ones_that_were_seen_where_the_prefix_lacks_its_end(
    shelf: Shelf, told: int | None
) -> None:
    """As SGLang 0.5.23 asks: the pages of the last node that it holds are left out."""
    keys = page_hashes(10)
    shelf.put(Places(ROOT, shelf).to_store([], keys))
    places = Places(ROOT, shelf)
    places.find(None, keys[:6])
    found = places.find(None if told is None else keys[:told], keys[6:])
    assert [block.start for block in found] == [48, 56, 64, 72]


def test_pages_of_another_chain_are_not_found_behind_it(shelf: Shelf) -> None:
    keys, other = page_hashes(6), page_hashes(6, "b")
    shelf.put(Places(ROOT, shelf).to_store([], keys))
    places = Places(ROOT, shelf)
    places.find(None, keys)
    assert places.find(None, other) == []
    assert places.find(keys, other) == []


def test_pages_stored_alone_are_found_each_and_in_any_mixture(shelf: Shelf) -> None:
    keys = page_hashes(9)
    places = Places(ROOT, shelf)
    shelf.put(places.to_store([], keys[:3]))
    shelf.put(places.to_store(None, keys[3:6]))
    shelf.put(places.to_store(keys[:6], keys[6:8]))
    for asking in (places, Places(ROOT, shelf)):
        found = asking.find(None, keys)
        assert len(found) == 8
        assert [block.start for block in found] == [0, 8, 16, 0, 0, 0, 8, 16]
    alone = block_of(ROOT, keys[4], None)
    assert found[4].name == alone.name
    assert alone.parent == ZERO_PARENT


def test_a_place_that_is_remembered_and_gone_from_the_store_is_not_found(shelf: Shelf) -> None:
    keys = page_hashes(4)
    places = Places(ROOT, shelf)
    blocks = places.to_store([], keys)
    shelf.put(blocks)
    shelf.names.discard(blocks[2].name)
    assert names(places.find([], keys)) == names(blocks[:2])
    shelf.names.clear()
    assert places.find([], keys) == []


def test_what_would_stand_behind_those_found(shelf: Shelf) -> None:
    keys = page_hashes(5)
    whole = list(chain_of(ROOT, keys, None))
    places = Places(ROOT, shelf)
    assert names(places.behind(None, [], keys)) == names(whole)
    assert names(places.behind(None, whole[:2], keys)) == names(whole[2:])
    assert names(places.behind(keys[:2], [], keys[2:])) == names(whole[2:])


def test_memory_is_bounded(shelf: Shelf) -> None:
    places = Places(ROOT, shelf)
    keys = [f"{n:064x}" for n in range(MOST_KNOWN + 50)]
    places.to_store(None, keys)
    assert len(places._known) == MOST_KNOWN


@pytest.mark.parametrize(
    "key",
    ["", "ab", "g" * 64, "A" * 64, "0" * 64 + ".mamba", "0" * 64 + "_k1_L0-4", "0" * 63, "０" * 64],
)
def test_keys_that_are_no_page_hash(key: str) -> None:
    assert not is_page_hash(key)


def test_a_key_that_is_one() -> None:
    assert is_page_hash(page_hashes(1)[0])
