"""Traces: what is read, and that a broken line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.kvstore.simulation import trace
from kvsnap.kvstore.simulation.trace import read_trace

GOOD = '{"hash_ids": [1, 2], "input_length": 600, "timestamp": 5}\n'


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "requests.jsonl"
        path.write_bytes(
            content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        )
        return path

    return write


def test_equal_hash_ids_after_equal_prefixes_are_equal_blocks(file: Any) -> None:
    lines = [[7, 8], [7, 9], [7, 8, 10], [8]]
    workload = read_trace(file("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in lines)))
    a, b, c, d = (request.chain for request in workload.requests)
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert c[:2] == a
    assert d[0] not in {*a, *b, *c}  # the same id after another prefix
    assert workload.block_size == 512
    assert [r.tokens for r in workload.requests] == [1024, 1024, 1536, 512]


def test_an_id_that_comes_twice_in_a_request_is_two_blocks(file: Any) -> None:
    (request,) = read_trace(file('{"hash_ids": [7, 7]}')).requests
    assert len(set(request.chain)) == 2


def test_token_ids_are_cut_into_filled_blocks(file: Any) -> None:
    content = '{"token_ids": [1, 2, 3, 4, 5]}\n\n[1, 2, 3, 9]\n[1]\n'
    workload = read_trace(file(content), block_size=2)
    a, b, c = (request.chain for request in workload.requests)
    assert (len(a), len(b), len(c)) == (2, 2, 0)
    assert a[0] == b[0]
    assert a[1] != b[1]
    assert [request.tokens for request in workload.requests] == [5, 4, 1]
    assert read_trace(file("[1]\n")).block_size == 64


def test_only_the_first_requests_are_read_where_asked_for(file: Any) -> None:
    assert len(read_trace(file(GOOD * 2 + "broken\n"), requests=2).requests) == 2


def test_a_mark_at_the_beginning_and_windows_line_ends_do_no_harm(file: Any) -> None:
    content = b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode() * 2
    assert len(read_trace(file(content)).requests) == 2


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ("{", "not JSON", "hash_ids"),
        ("\udcff\udcfe", "not JSON", "hash_ids"),
        ("7", "neither an object nor a list", "hash_ids"),
        ("[" * 100_000, "not JSON", "hash_ids"),
        ('{"hash_ids": [1], "token_ids": [1]}', "both", "hash_ids"),
        ('{"prompt": "x"}', "neither hash_ids nor token_ids", "hash_ids"),
        ('{"token_ids": [1]}', "token_ids, but hash_ids before", "two files"),
        ('{"hash_ids": 7}', "not a list of integers", "hash_ids"),
        ('{"hash_ids": ["a"]}', "not a list of integers", "hash_ids"),
        ('{"hash_ids": [true]}', "not a list of integers", "hash_ids"),
        ('{"hash_ids": [1.0]}', "not a list of integers", "hash_ids"),
        ('{"hash_ids": [1], "input_length": "9"}', "input_length is '9'", "tokens"),
        ('{"hash_ids": [1], "input_length": -9}', "input_length is -9", "tokens"),
        ('{"hash_ids": [1], "input_length": 9000}', "cannot be 9000 tokens", "--block-size"),
        ('{"hash_ids": [1, 2], "input_length": 512}', "cannot be 512 tokens", "--block-size"),
        ('{"hash_ids": [1], "timestamp": 4}', "timestamp 4 after 5", "sort"),
    ],
)
def test_a_broken_line_is_named(file: Any, line: str, what: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_trace(file(GOOD + "\n" + line + "\n"))
    assert "requests.jsonl, line 3: " in caught.value.what
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert "\n" not in caught.value.what + caught.value.hint


@pytest.mark.parametrize("ids", ["7", "[true]", "[1.5]", "[-1]", "[4294967296]", "[[1]]", '["a"]'])
def test_token_ids_that_are_none_are_named(file: Any, ids: str) -> None:
    with pytest.raises(UsageError, match=r"line 2: .*token"):
        read_trace(file(f'[1]\n{{"token_ids": {ids}}}\n'))


def test_an_empty_file_has_no_requests(file: Any) -> None:
    with pytest.raises(UsageError, match="no requests"):
        read_trace(file("\n"))


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(NotFound, match="cannot read"):
            read_trace(path)


def test_a_line_without_end_is_refused_before_it_fills_the_memory(
    file: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_LINE", 100)
    with pytest.raises(UsageError, match="line 2: longer than 100 bytes"):
        read_trace(file("[1]\n" + "[" + "1, " * 200))
