"""Session files: a conversation's ids, chain, tail and notes, written and read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Layout
from kvsnap.formats.session import SessionFile, SessionRecord, pack_session, parse_session

Rows = Callable[..., dict[str, np.ndarray]]
Bytes = Callable[..., bytes]
Record = Callable[..., SessionRecord]


def read(file: bytes) -> SessionFile:
    check_file_digest(memoryview(file))
    return parse_session(memoryview(file))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 8, 9, 31, 32, 33])
def test_a_session_comes_back_with_its_tail(
    session_record: Record, session_bytes: Bytes, random_rows: Rows, tokens: int, codec: str
) -> None:
    record = session_record(tokens)
    session = read(session_bytes(record, codec))
    session.check_talk()
    found = session.record
    assert np.array_equal(found.token_ids, record.token_ids)
    assert replace(found, token_ids=record.token_ids) == record
    tail = session.tail_rows()
    expected: Mapping[str, np.ndarray] = random_rows(tokens % 4) if tokens % 4 else {}
    assert tail.keys() == expected.keys()
    assert all(np.array_equal(tail[name], array) for name, array in expected.items())


def test_the_tail_is_what_follows_the_last_filled_block(session_record: Record) -> None:
    shape = {n: (session_record(n).tail_start, session_record(n).tail_tokens) for n in range(10)}
    assert shape == {
        0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (0, 3), 4: (4, 0),
        5: (4, 1), 6: (4, 2), 7: (4, 3), 8: (8, 0), 9: (8, 1),
    }  # fmt: skip


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_equal_sessions_give_equal_bytes(
    session_record: Record, session_bytes: Bytes, codec: str
) -> None:
    one = session_record(notes={"a": 1, "b": {"c": [2], "d": None}})
    two = session_record(notes={"b": {"d": None, "c": [2]}, "a": 1})
    assert session_bytes(one, codec) == session_bytes(two, codec)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "alice/43"},
        {"tenant_id": "00" * 32},
        {"root_id": "00" * 32},
        {"revision": 4},
    ],
    ids=lambda change: next(iter(change)),
)
def test_both_digests_cover_every_field(
    session_record: Record, session_bytes: Bytes, change: dict[str, Any]
) -> None:
    before = read(session_bytes(session_record()))
    after = read(session_bytes(session_record(**change)))
    assert before.talk != after.talk
    assert before.content != after.content
    assert getattr(after.record, next(iter(change))) == next(iter(change.values()))


@pytest.mark.parametrize(
    "change",
    [{"identity": "{}"}, {"notes": {}}, {"chain": (bytes(32), bytes(32))}],
    ids=lambda change: next(iter(change)),
)
def test_the_talk_digest_covers_identity_notes_and_chain(
    session_record: Record, session_bytes: Bytes, change: dict[str, Any]
) -> None:
    before = read(session_bytes(session_record()))
    assert before.talk != read(session_bytes(session_record(**change))).talk


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"text": '\0\n"\\é\U0001f600\ud800'},
        {"n": [0, -1, 1.5, 1e300, 2**70, True, None, "", [], {}]},
        {"deep": json.loads("[" * 50 + "]" * 50)},
    ],
    ids=["empty", "text", "values", "deep"],
)
def test_notes_are_any_json(
    session_record: Record, session_bytes: Bytes, notes: dict[str, Any]
) -> None:
    session = read(session_bytes(session_record(notes=notes)))
    session.check_talk()
    assert session.record.notes == notes


def test_notes_with_numbers_for_keys_are_read_back_as_json_has_them(
    session_record: Record, session_bytes: Bytes
) -> None:
    # Sorted as numbers they stand 9, 10; sorted as text 10, 9: the digest must be of what is read.
    session = read(session_bytes(session_record(notes={"turns": {9: "a", 10: "b", "x": "c"}})))
    session.check_talk()
    assert session.record.notes == {"turns": {"9": "a", "10": "b", "x": "c"}}


def test_a_chain_must_fit_the_token_ids(session_record: Record) -> None:
    for chain in ((), (bytes(32),), (bytes(32),) * 3):
        with pytest.raises(Damaged, match=f"{len(chain)} blocks for 10 token ids"):
            session_record(chain=chain)


def test_a_tail_of_another_length_is_not_packed(
    session_record: Record, random_rows: Rows, layout: Layout
) -> None:
    for tail in ({}, random_rows(1), random_rows(3)):
        with pytest.raises(Damaged):
            pack_session(session_record(), get_codec("raw"), layout, tail)


def test_a_session_without_blocks_or_tail_still_carries_its_layout(
    session_record: Record, session_bytes: Bytes
) -> None:
    session = read(session_bytes(session_record(0)))
    assert session.record.identity == session_record(0).identity
    assert session.record.chain == ()
    assert session.tail_rows() == {}
