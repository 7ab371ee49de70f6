"""Names are for ever: constants, and the design's formula written a second time."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from kvsnap.formats.names import ZERO_PARENT, block_name, chain_names, extra, token_array

ROOT_KEY = bytes(range(32))
IDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 2**32 - 1, 0]
CHAIN = [
    "cf0c59ac07817b4ffef2a70aacf5917694ed5524b37055eda7510f1658f003c1",
    "42f7b90e6b1fdbbe5c6d03736b61418a1e81fad15fc08ac3212cca1d64c8e3f5",
    "54e476f92f3a7aa238b06577ffcd6fc41162b460cef6600164f0fe34293f061b",
]


def by_the_formula(parent: bytes, ids: Sequence[int], extras: bytes = b"") -> str:
    """design.md section 3: BLAKE3(key = root, parent ‖ u32 count ‖ ids as u32 LE ‖ extras)."""
    data = parent + struct.pack(f"<{len(ids) + 1}I", len(ids), *ids) + extras
    digest: str = blake3(data, key=ROOT_KEY).hexdigest()
    return digest


def test_names_equal_the_golden_constants() -> None:
    assert [name.hex() for name in chain_names(ROOT_KEY, token_array(IDS), 4)] == CHAIN


def test_the_golden_constants_follow_from_the_formula() -> None:
    parent, names = "00" * 32, []
    for start in (0, 4, 8):
        parent = by_the_formula(bytes.fromhex(parent), IDS[start : start + 4])
        names.append(parent)
    assert names == CHAIN


def test_extras_are_appended_to_what_is_hashed() -> None:
    ids, parent = token_array([5]), bytes.fromhex(CHAIN[0])
    state = extra("state", b"")
    assert state == bytes.fromhex("05000000737461746500000000")
    golden = "a263a0a0e44fe7f1577af3e2a159f7c52e245429bc2d3b9c08f0482cdeec25c9"
    assert block_name(ROOT_KEY, parent, ids, state).hex() == golden
    assert by_the_formula(parent, [5], state) == golden


def test_a_name_of_no_tokens_exists() -> None:
    golden = "16a5dee3a51e1b182d411b8bda82ac799a7715810d5301a5f55f35ec82987401"
    assert block_name(ROOT_KEY, ZERO_PARENT, token_array([])).hex() == golden
    assert by_the_formula(ZERO_PARENT, []) == golden


def test_extras_records_cannot_be_mistaken_for_each_other() -> None:
    # Without the two lengths these four would all be the same bytes.
    records = [extra("ab", b"cd"), extra("abc", b"d"), extra("a", b"bcd"), extra("abcd", b"")]
    assert len(set(records)) == 4
    assert extra("a", b"") + extra("b", b"") != extra("a", extra("b", b""))


def test_extras_and_ids_cannot_be_mistaken_for_each_other() -> None:
    # The count in front of the ids says where they end.
    record = extra("x", b"")
    as_ids = struct.unpack(f"<{len(record + bytes(3)) // 4}I", record + bytes(3))
    with_extras = block_name(ROOT_KEY, ZERO_PARENT, token_array([1]), record + bytes(3))
    assert with_extras != block_name(ROOT_KEY, ZERO_PARENT, token_array([1, *as_ids]))


def test_another_root_or_parent_makes_another_name() -> None:
    ids = token_array(IDS[:4])
    other_root = block_name(bytes(32), ZERO_PARENT, ids).hex()
    other_parent = block_name(ROOT_KEY, b"\1" + bytes(31), ids).hex()
    assert len({CHAIN[0], other_root, other_parent}) == 3
