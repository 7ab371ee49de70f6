"""A change of any token changes its block's name and every later one (case A14)."""

from __future__ import annotations

import numpy as np
import pytest

from kvsnap.formats import names
from kvsnap.formats.names import chain_names, token_array

KEY = bytes(range(32))
BLOCK = 16
IDS = np.random.default_rng(14).integers(100, 30000, 64).astype(np.uint32)
CHAIN = chain_names(KEY, IDS, BLOCK)


def assert_only_the_blocks_before_are_shared(changed: np.ndarray, first_changed: int) -> None:
    assert not np.array_equal(changed, IDS)
    other = chain_names(KEY, changed, BLOCK)
    assert other[:first_changed] == CHAIN[:first_changed]
    assert not set(other[first_changed:]) & set(CHAIN)


@pytest.mark.parametrize("at", range(47))
def test_plus_31_and_minus_1_on_neighbours_changes_the_name(at: int) -> None:
    # A polynomial rolling hash with base 31 does not see this.
    changed = IDS.copy()
    changed[at] += 31
    changed[at + 1] -= 1
    assert_only_the_blocks_before_are_shared(changed, at // BLOCK)


@pytest.mark.parametrize("at", range(47))
def test_swapping_two_neighbours_changes_the_name(at: int) -> None:
    changed = IDS.copy()
    changed[[at, at + 1]] = changed[[at + 1, at]]
    assert_only_the_blocks_before_are_shared(changed, at // BLOCK)


@pytest.mark.parametrize("edge", [16, 32, 48])
def test_moving_a_token_across_a_block_edge_changes_the_name(edge: int) -> None:
    # The last token of one block goes to the end of the next: both hold other tokens.
    order = [*range(edge - 1), *range(edge, edge + BLOCK), edge - 1, *range(edge + BLOCK, 64)]
    assert_only_the_blocks_before_are_shared(IDS[order], edge // BLOCK - 1)


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_of_an_id_enters_the_name(bit: int) -> None:
    changed = IDS.copy()
    changed[20] ^= np.uint32(1) << np.uint32(bit)
    assert_only_the_blocks_before_are_shared(changed, 1)


def test_another_block_size_makes_other_names() -> None:
    by_eight = chain_names(KEY, IDS, 8)
    assert len(by_eight) == 8
    assert not set(by_eight) & set(CHAIN)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 31, 32, 33, 48, 49])
def test_only_filled_blocks_have_names(tokens: int) -> None:
    assert chain_names(KEY, IDS[:tokens], BLOCK) == CHAIN[: tokens // BLOCK]


def test_equal_blocks_at_other_positions_have_other_names() -> None:
    assert len(set(chain_names(KEY, token_array([7] * 64), BLOCK))) == 4


def test_naming_a_chain_copies_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def watch(key: bytes, parts: tuple[bytes, bytes, memoryview, bytes]) -> bytes:
        hashed.append(np.frombuffer(parts[2], np.uint32))
        return bytes(32)

    monkeypatch.setattr(names, "keyed_hash", watch)
    chain_names(KEY, IDS, BLOCK)
    assert len(hashed) == 4
    assert all(np.shares_memory(part, IDS) for part in hashed)


def test_the_whole_digest_of_a_media_item_and_its_offset_enter_the_name() -> None:
    # A09: placeholder ids are equal for every picture, and 16 bits of a digest are not enough.
    one, two = bytes(30) + b"\xab\xcd", b"\x01" + bytes(29) + b"\xab\xcd"
    payloads = [one + bytes(4), two + bytes(4), one + b"\1\0\0\0"]
    ids = token_array([9] * BLOCK)
    found = {names.block_name(KEY, CHAIN[0], ids, names.extra("media", p)) for p in payloads}
    found.add(names.block_name(KEY, CHAIN[0], ids))
    assert len(found) == 4
