"""What serving engines mix into a block's name: fixed bytes, and never one kind taken for another."""

from __future__ import annotations

import itertools

import pytest

from kvsnap.formats.extras import PAGE_HASH, media_extra, page_hash_words, salt_extra
from kvsnap.formats.names import ZERO_PARENT, block_name, token_array

KEY = bytes(range(32))
DIGEST = "00ff" * 16
SALT_A = "0400000073616c7420000000251d58e818d19d191f5ba3b8a79be10eb30d73edf9a9c08d2d95942701146a75"
MEDIA = (
    "050000006d6564696148000000fbffffffffffffff"
    "61626162616261626162616261626162616261626162616261626162616261626162616261626162"
    "616261626162616261626162616261626162616261626162"
)


def test_the_bytes_are_those_of_the_format_page() -> None:
    assert salt_extra("a").hex() == SALT_A
    assert media_extra("ab" * 32, -5).hex() == MEDIA
    assert PAGE_HASH.hex() == "0900000070616765206861736800000000"


def test_no_two_of_them_are_equal() -> None:
    """An adapter, a salt and an image of one name were one key in vLLM once."""
    word = "x"
    all_of_them = [
        b"",
        PAGE_HASH,
        salt_extra(word),
        salt_extra(""),
        salt_extra(word + word),
        media_extra(word, 0),
        media_extra(word, 1),
        media_extra("", 0),
        salt_extra(word) + media_extra(word, 0),
        media_extra(word, 0) + media_extra(word, 0),
        media_extra(word, 0) + media_extra(word, 1),
    ]
    ids = token_array([1, 2, 3])
    names = [block_name(KEY, ZERO_PARENT, ids, extras) for extras in all_of_them]
    for one, other in itertools.combinations(names, 2):
        assert one != other


def test_a_salt_does_not_stand_in_the_file() -> None:
    assert b"secret of a user" not in salt_extra("secret of a user")


@pytest.mark.parametrize("salt", ["ä", "a\x00b", "\U0001f600", "a" * 10_000])
def test_any_salt_has_one_length(salt: str) -> None:
    assert len(salt_extra(salt)) == len(salt_extra(""))


def test_a_page_hash_is_eight_words() -> None:
    words = page_hash_words(DIGEST)
    assert words.tolist() == [0xFF00FF00] * 8
    assert words.tobytes().hex() == DIGEST


@pytest.mark.parametrize("digest", ["", "00" * 31, "00" * 33, "zz" * 32, "00" * 31 + "0"])
def test_anything_shorter_or_longer_stands_for_no_tokens(digest: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        page_hash_words(digest)
