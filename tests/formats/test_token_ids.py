"""What may be a token id: integers in 0..2^32-1 and nothing that merely equals one (case A13)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import BadTokenIds
from kvsnap.formats.names import ZERO_PARENT, block_name, common_prefix, token_array

KEY = bytes(32)


@pytest.mark.parametrize(
    "ids",
    [
        [True],
        [1, False],
        [1.0],
        [np.float32(1)],
        [np.float64(1)],
        [np.bool_(True)],
        [None],
        ["1"],
        [b"1"],
        [1 + 0j],
        np.array([1.0]),
        np.array([True]),
        np.array([1], object),
    ],
    ids=repr,
)
def test_what_only_equals_an_integer_is_refused(ids: Any) -> None:
    with pytest.raises(BadTokenIds, match="integer"):
        token_array(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [-1],
        [-2],
        [2**32],
        [2**61],
        [5 + 2**61 - 1],
        [2**63],
        [2**64],
        [-(2**70)],
        [np.int64(-1)],
        [np.uint64(2**64 - 1)],
        np.array([-1]),
        np.array([-1], np.int8),
        np.array([2**32]),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=repr,
)
def test_ids_out_of_range_are_refused_before_hashing(ids: Any) -> None:
    # -1 and -2, or n and n + 2**61 - 1, have one built-in hash; none of them gets as far.
    with pytest.raises(BadTokenIds, match="outside"):
        token_array(ids)


@pytest.mark.parametrize(
    "ids",
    [[[1, 2], [3, 4]], [(1,)], np.zeros((2, 2), int), np.array(3), b"12", {1, 2}, "12", {1: 2}],
    ids=repr,
)
def test_what_is_no_flat_list_is_refused(ids: Any) -> None:
    with pytest.raises(BadTokenIds):
        token_array(ids)


@pytest.mark.parametrize(
    "ids",
    [
        [0, 1, 2**32 - 1],
        (0, 1, 2**32 - 1),
        [np.uint8(0), np.int64(1), np.uint64(2**32 - 1)],
        np.array([0, 1, 2**32 - 1]),
        np.array([0, 1, 2**32 - 1], np.uint64),
        np.array([0, 1, 2**32 - 1], "<u4"),
        np.array([0, 1, 2**32 - 1], ">u4"),
        np.array([0, 9, 1, 9, 2**32 - 1, 9], np.uint32)[::2],
    ],
    ids=repr,
)
def test_every_spelling_of_the_same_ids_has_one_name(ids: Any) -> None:
    array = token_array(ids)
    assert array.dtype == np.uint32
    assert array.tolist() == [0, 1, 2**32 - 1]
    assert block_name(KEY, ZERO_PARENT, array).hex() == (
        "ea0e93357fe8e9137c13b4dd447ae0e040ad59b057095031b09d6cb9cd98b9e6"
    )


def test_a_range_and_an_empty_list_are_token_ids() -> None:
    assert token_array(range(3)).tolist() == [0, 1, 2]
    assert token_array([]).dtype == np.uint32
    assert token_array([]).shape == (0,)


def test_an_array_of_u32_is_taken_as_it_is() -> None:
    ids = np.arange(10, dtype=np.uint32)
    assert token_array(ids) is ids


def test_no_tokens_and_token_zero_have_different_names() -> None:
    names = {block_name(KEY, ZERO_PARENT, token_array([0] * n)) for n in range(4)}
    assert len(names) == 4


def test_the_common_prefix_ends_at_the_first_differing_id() -> None:
    a, b = token_array([1, 2, 3, 4]), token_array([1, 2, 9, 4, 5])
    assert common_prefix(a, b) == 2
    assert common_prefix(a, a[:3]) == 3
    assert common_prefix(a, token_array([])) == 0
    assert common_prefix(a, token_array([7])) == 0
