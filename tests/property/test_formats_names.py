"""Shared prefix of token ids ⇔ shared names, up to the last common filled block."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.names import chain_names, common_prefix, token_array

KEY = bytes(range(32))
# Few ids, so that two sequences often share a long front and often part in the middle of a block.
ids_lists = st.lists(st.sampled_from([0, 1, 2**31, 2**32 - 1]), max_size=24)


@given(front=ids_lists, a=ids_lists, b=ids_lists, block=st.integers(1, 8))
def test_names_are_shared_exactly_as_far_as_ids_are(
    front: list[int], a: list[int], b: list[int], block: int
) -> None:
    one, two = token_array(front + a), token_array(front + b)
    shared = common_prefix(one, two) // block
    names_one, names_two = chain_names(KEY, one, block), chain_names(KEY, two, block)
    assert names_one[:shared] == names_two[:shared]
    assert not set(names_one[shared:]) & set(names_two[shared:])


@given(ids=ids_lists, block=st.integers(1, 8), cut=st.integers(0, 24))
def test_the_names_of_a_prefix_are_a_prefix_of_the_names(
    ids: list[int], block: int, cut: int
) -> None:
    whole = chain_names(KEY, token_array(ids), block)
    front = chain_names(KEY, token_array(ids[:cut]), block)
    assert front == whole[: min(cut, len(ids)) // block]
    assert len(set(whole)) == len(whole)


@given(a=ids_lists, b=ids_lists)
def test_the_common_prefix_is_the_longest_equal_front(a: list[int], b: list[int]) -> None:
    count = common_prefix(token_array(a), token_array(b))
    assert a[:count] == b[:count]
    assert count == min(len(a), len(b)) or a[count] != b[count]
