"""Session files that are damaged or lie. A damaged tail alone leaves the conversation usable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.session import SessionRecord, parse_session

Bytes = Callable[..., bytes]
Record = Callable[..., SessionRecord]
Header = dict[str, Any]


@pytest.fixture
def file(session_bytes: Bytes, session_record: Record) -> bytes:
    return session_bytes(session_record(10))


def refusal(file: bytes) -> KvsnapError:
    check_file_digest(memoryview(file))
    with pytest.raises(KvsnapError) as caught:
        parse_session(memoryview(file)).check_talk()
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 200
    return caught.value


def field(**fields: Any) -> Callable[[Header, bytearray], None]:
    return lambda header, _: header["__metadata__"].update(fields)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_every_damaged_byte_of_the_tail_is_found_and_the_talk_stays_good(
    session_bytes: Bytes, session_record: Record, codec: str
) -> None:
    damaged = bytearray(session_bytes(session_record(10), codec))
    tail = 10 * 4 + 2 * 32  # after ids and chain
    begin = int.from_bytes(damaged[:8], "little") + 8 + tail
    assert len(damaged) - begin > 80
    for at in range(begin, len(damaged)):
        damaged[at] ^= 0x10
        session = parse_session(memoryview(damaged))
        session.check_talk()
        assert session.record.token_ids.tolist() == list(range(100, 110))
        with pytest.raises(Damaged):
            session.tail_rows()
        damaged[at] ^= 0x10


def test_every_damaged_byte_of_ids_and_chain_fails_the_talk(file: bytes) -> None:
    damaged = bytearray(file)
    begin = int.from_bytes(damaged[:8], "little") + 8
    for at in range(begin, begin + 10 * 4 + 2 * 32):
        damaged[at] ^= 0x10
        session = parse_session(memoryview(damaged))
        with pytest.raises(Damaged, match="token ids or notes changed"):
            session.check_talk()
        damaged[at] ^= 0x10


@pytest.mark.parametrize("version", ["0", "2", "99"])
def test_another_format_version_is_refused_by_name(
    file: bytes, resign: Bytes, version: str
) -> None:
    error = refusal(resign(file, field(kvsnap=version)))
    assert type(error) is Unsupported
    assert error.what == f"format version {version!r}; this kvsnap reads version 1"


def test_a_chain_of_unknown_fidelity_leaves_the_conversation_readable(
    session_record: Callable[..., SessionRecord], session_bytes: Bytes
) -> None:
    # A newer kvsnap or another package's codec wrote its blocks; ids, notes and tail are readable.
    record = replace(session_record(10), fidelity="kivi@1;bits=2")
    found = parse_session(memoryview(session_bytes(record)))
    assert found.record.token_ids.tolist() == record.token_ids.tolist()
    found.check_talk()
    found.tail_rows()


def test_an_unknown_codec_is_refused_by_name(file: bytes, resign: Bytes) -> None:
    error = refusal(resign(file, field(codec="lz4")))
    assert type(error) is Unsupported
    assert "'lz4'" in error.what


@pytest.mark.parametrize("size", ["0", "-1", "65537", "4.0", "", "9" * 30])
def test_an_impossible_block_size_is_damaged(file: bytes, resign: Bytes, size: str) -> None:
    assert type(refusal(resign(file, field(block_size=size)))) is Damaged


@pytest.mark.parametrize("size", ["1", "2", "3", "11"])
def test_a_block_size_that_does_not_fit_the_chain_is_damaged(
    file: bytes, resign: Bytes, size: str
) -> None:
    assert "blocks for 10 token ids" in refusal(resign(file, field(block_size=size))).what


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "bob"},
        {"tenant_id": "eve"},
        {"root_id": "00" * 32},
        {"identity": "{}"},
        {"revision": "4"},
        {"block_size": "5"},  # two blocks for ten ids, as before
        {"notes": "{}"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_changed_field_fails_the_talk(
    file: bytes, resign: Bytes, changed: dict[str, str]
) -> None:
    error = refusal(resign(file, field(**changed)))
    assert "changed after they were written" in error.what


@pytest.mark.parametrize(
    "notes", ["", "{", "[]", "null", "1", '"x"', "[" * 10**5, '{"a":' * 10**5, "{}x"]
)
def test_notes_that_are_no_json_table_are_damaged(file: bytes, resign: Bytes, notes: str) -> None:
    assert "the notes are not" in refusal(resign(file, field(notes=notes))).what


@pytest.mark.parametrize("depth", [100, 300, 500, 700, 900, 990])
def test_deeply_nested_notes_are_no_crash(file: bytes, resign: Bytes, depth: int) -> None:
    refusal(resign(file, field(notes='{"a":' * depth + "1" + "}" * depth)))


@pytest.mark.parametrize(
    "missing", ["block_size", "name", "notes", "revision", "talk", "tenant_id", "content"]
)
def test_a_missing_field_is_damaged_and_named(file: bytes, resign: Bytes, missing: str) -> None:
    error = refusal(resign(file, lambda header, _: header["__metadata__"].pop(missing)))
    assert error.what == f"the header has no field {missing!r}"


@pytest.mark.parametrize("shape", [[64], [1, 64], [4, 16], [2, 32, 1], [1, 2, 32]])
def test_a_chain_of_another_shape_is_damaged(file: bytes, resign: Bytes, shape: list[int]) -> None:
    error = refusal(resign(file, lambda header, _: header["chain"].update(shape=shape)))
    assert type(error) is Damaged


def test_tensors_without_a_tail_are_damaged(
    session_bytes: Bytes, session_record: Record, resign: Bytes
) -> None:
    def add(header: Header, data: bytearray) -> None:
        end = len(data)
        header["full.k"] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
        data += bytes(4)

    session = parse_session(memoryview(resign(session_bytes(session_record(8)), add)))
    with pytest.raises(Damaged, match="tensors without a tail"):
        session.tail_rows()


def test_a_hostile_layout_in_the_identity_is_damaged(
    session_bytes: Bytes, session_record: Record
) -> None:
    layout = [{"group": "g", "layers": 2**31 - 1, "span": None, "planes": [
        {"plane": "k", "kind": "rows", "dtype": "U8", "row": [2**31 - 1], "rope": None}
    ]}]  # fmt: skip
    record = session_record(10, identity=json.dumps({"layout": layout}))
    session = parse_session(memoryview(session_bytes(record)))
    with pytest.raises(Damaged, match="more than any block has"):
        session.tail_rows()
