"""Session names over the alphabet of case A07, and over all of Unicode."""

from __future__ import annotations

import random
import string
from urllib.parse import unquote

from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvsnap.formats.errors import UsageError
from kvsnap.formats.session_name import MAX_FILE_NAME, SUFFIX, session_file_name

ALPHABET = string.ascii_letters + string.digits + "/@.:%_-"


def test_five_hundred_random_names_are_distinct_and_reversible() -> None:
    source = random.Random(7)
    names = {"".join(source.choices(ALPHABET, k=source.randint(1, 40))) for _ in range(500)}
    files = {name: session_file_name(name) for name in names}
    assert len({file.casefold() for file in files.values()}) == len(names) > 450
    for name, file in files.items():
        assert unquote(file.removesuffix(SUFFIX)) == name
        assert "/" not in file
        assert not file.startswith(".")


@given(one=st.text(ALPHABET, min_size=1, max_size=6), two=st.text(ALPHABET, min_size=1, max_size=6))
@example(one="%2f", two="/")
def test_different_names_have_different_files(one: str, two: str) -> None:
    assume(one != two)
    assert session_file_name(one).casefold() != session_file_name(two).casefold()


@given(name=st.text(min_size=1, max_size=300))
def test_every_name_is_refused_or_has_a_safe_file_that_tells_it(name: str) -> None:
    try:
        file = session_file_name(name)
    except UsageError:
        assert not name.isprintable()
        return
    stem = file.removesuffix(SUFFIX)
    assert len(stem) <= MAX_FILE_NAME
    assert set(stem) <= set(string.ascii_lowercase + string.digits + "%._-~")
    assert stem[0] != "."
    assert stem[-1] not in ". "
    assert stem.startswith("%~") or unquote(stem, errors="strict") == name
