"""Session names become file names: distinct, reversible, safe on every file system (A07, A69)."""

from __future__ import annotations

import re
from itertools import combinations
from urllib.parse import unquote

import pytest
from blake3 import blake3

from kvsnap.formats.errors import UsageError
from kvsnap.formats.session_name import MAX_NAME, SUFFIX, session_file_name

PAIRS = [
    ("org/model-SEP-name", "org/model/name"),
    ("a/b", "a_b"),
    ("a/b", "a--b"),
    ("a_b", "a--b"),
    ("a/b", "a%2fb"),
    ("a%2fb", "a%252fb"),
    ("x@y", "x%40y"),
    ("x@1", "x-1"),
    ("a:b", "a/b"),
    (".a", "a"),
    ("a.", "a"),
    ("a ", "a"),
    ("a", " a"),
    ("A", "a"),
    ("straße", "STRASSE"),
    ("\u00e9", "e\u0301"),  # NFC, NFD
    ("con", "CON"),
    ("con", "%63on"),
    ("~", "%~"),
    ("a.safetensors", "a"),
]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_names_never_share_a_file_even_where_case_is_folded(one: str, two: str) -> None:
    a, b = session_file_name(one), session_file_name(two)
    assert a.casefold() != b.casefold()


def test_all_of_them_together_are_distinct() -> None:
    names = sorted({name for pair in PAIRS for name in pair})
    files = {session_file_name(name).casefold() for name in names}
    assert len(files) == len(names)


@pytest.mark.parametrize("name", sorted({name for pair in PAIRS for name in pair}))
def test_a_name_can_be_read_back_from_its_file(name: str) -> None:
    assert unquote(session_file_name(name).removesuffix(SUFFIX), errors="strict") == name


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("alice", "alice.safetensors"),
        ("alice/42", "alice%2f42.safetensors"),
        ("v1.2_x-y", "v1.2_x-y.safetensors"),
        ("Chat 1", "%43hat%201.safetensors"),
        ("../x", "%2e.%2fx.safetensors"),
        ("..", "%2e%2e.safetensors"),
        (".", "%2e.safetensors"),
        ("/abs", "%2fabs.safetensors"),
        ("a/../../b", "a%2f..%2f..%2fb.safetensors"),
        ("..%2f", "%2e.%252f.safetensors"),
        ("C:x", "%43%3ax.safetensors"),
        ("C:\\x", "%43%3a%5cx.safetensors"),
        ("CON", "%43%4f%4e.safetensors"),
        ("con", "%63on.safetensors"),
        ("con.txt", "%63on.txt.safetensors"),
        ("lpt9", "%6cpt9.safetensors"),
        ("console", "console.safetensors"),
        ("x.", "x%2e.safetensors"),
        ("x ", "x%20.safetensors"),
        ("~", "%7e.safetensors"),
        ("-rf", "-rf.safetensors"),
    ],
)
def test_a_name_that_could_mean_a_path_or_a_device_is_escaped(name: str, file: str) -> None:
    # These are stored in people's folders: they may not change.
    assert session_file_name(name) == file


@pytest.mark.parametrize("device", ["con", "prn", "aux", "nul", "com0", "com9", "lpt0", "lpt9"])
@pytest.mark.parametrize("end", ["", ".", ".txt", ".a.b"])
def test_no_file_is_a_windows_device(device: str, end: str) -> None:
    stem = session_file_name(device + end).partition(".")[0]
    assert stem != device


@pytest.mark.parametrize(
    "name", ["a\0b", "\0", "a\nb", "a\tb", "\x1b[31m", "\x7f", "\u202eabc", "\ud800", "\u2028"]
)
def test_control_characters_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="control characters"):
        session_file_name(name)


@pytest.mark.parametrize("name", ["", "a" * 5000, "a" * (MAX_NAME + 1), "é" * 513, "\0" * 5000])
def test_names_of_no_or_too_many_bytes_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 1024 bytes") as caught:
        session_file_name(name)
    assert len(caught.value.what) < 100  # the name itself is not repeated


@pytest.mark.parametrize(
    "name", ["a" * 200, "a" * 201, "a" * 1024, "/" * 66, "/" * 67, "é" * 512, "A/" * 500]
)
def test_a_file_name_fits_every_file_system(name: str) -> None:
    # 255 bytes, of which a conflicting save's "@n" needs some.
    file = session_file_name(name)
    assert len(file.encode()) <= 255 - len("%40999999")
    assert re.fullmatch(r"[a-z0-9%_.~-]+", file)


def test_a_name_too_long_for_a_file_name_becomes_a_digest() -> None:
    assert session_file_name("a" * 200) == "a" * 200 + SUFFIX
    digest = blake3(b"a" * 201).hexdigest()
    assert session_file_name("a" * 201) == f"%~{digest}{SUFFIX}"


def test_long_names_that_differ_at_their_end_are_distinct() -> None:
    names = ["x" * 1000 + end for end in ("", "a", "b", "A", "/")]
    for one, two in combinations(names, 2):
        assert session_file_name(one) != session_file_name(two)


def test_a_name_cannot_pose_as_a_digest() -> None:
    long = "a" * 201
    posed = session_file_name(long).removesuffix(SUFFIX)
    assert session_file_name(posed) != session_file_name(long)
