"""Foreign safetensors files: read as the library reads them, written as it writes them, refused if not."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.interchange.safetensors_file import (
    MAX_HEADER,
    parse_tensors,
    peek_header,
    tensor_of,
    write_tensors,
)

TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32, torch.uint32, torch.float32,
    torch.complex64, torch.float64, torch.int64, torch.uint64,
]  # fmt: skip


def file_of(header: Any, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def entry(dtype: Any = "F16", shape: Any = (2,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


GOOD = file_of(
    {"__metadata__": {"a": "b"}, "x": entry(), "y": entry("U8", [3], [4, 7])}, b"0123456"
)


@pytest.mark.parametrize("metadata", [None, {"one": 'é "\n\x01\\ /'}])
def test_written_again_is_what_the_library_wrote(metadata: dict[str, str] | None) -> None:
    tensors = {str(dtype): torch.zeros(2, 3, dtype=torch.uint8).to(dtype) for dtype in TYPES}
    tensors |= {"é\n": torch.tensor(7), "none": torch.zeros(0, 4), "B": torch.ones(5)}
    theirs = safetensors.torch.save(tensors, metadata)
    file = parse_tensors(memoryview(theirs))
    assert file.metadata == (metadata or {})
    assert file.tensors.keys() == tensors.keys()
    assert write_tensors(file.metadata, file.tensors) == theirs


def test_elements_are_unsigned_integers_of_their_width() -> None:
    values = torch.tensor([[1.0, -2.0, 0.5]])
    saved = safetensors.torch.save({"h": values.bfloat16(), "f": values, "s": torch.tensor(-1)})
    tensors = parse_tensors(memoryview(saved)).tensors
    assert tensors["h"].array().tolist() == [[0x3F80, 0xC000, 0x3F00]]
    assert tensors["f"].array().dtype == np.uint32
    assert tensors["f"].array().view("<f4").tolist() == values.tolist()
    assert tensors["s"].array().shape == ()
    assert int(tensors["s"].array()) == 2**64 - 1


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from([("U8", 1), ("BF16", 2), ("I32", 4)]), st.binary(max_size=40)),
        max_size=6,
    ),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("aé\n"), max_size=3),
)
def test_what_is_written_is_read_here_and_by_the_library(
    contents: dict[str, tuple[tuple[str, int], bytes]], metadata: dict[str, str]
) -> None:
    tensors = {}
    for name, ((dtype, item), data) in contents.items():
        elements = np.frombuffer(data[: len(data) // item * item], f"<u{item}")
        tensors[name] = tensor_of(dtype, elements)
    written = write_tensors(metadata, tensors)
    file = parse_tensors(memoryview(written))
    assert file.metadata == metadata
    assert {name: bytes(t.data) for name, t in file.tensors.items()} == {
        name: bytes(t.data) for name, t in tensors.items()
    }
    theirs = safetensors.torch.load(written)
    assert theirs.keys() == tensors.keys()


def test_arrays_that_are_not_contiguous_are_written_by_their_values() -> None:
    array = np.arange(12, dtype=np.uint16).reshape(3, 4).T
    written = write_tensors({}, {"t": tensor_of("BF16", array)})
    assert np.array_equal(parse_tensors(memoryview(written)).tensors["t"].array(), array)


def test_a_file_that_is_cut_is_refused_at_every_length() -> None:
    assert set(parse_tensors(GOOD).tensors) == {"x", "y"}
    for size in range(len(GOOD)):
        with pytest.raises(Damaged):
            parse_tensors(GOOD[:size])


def test_a_file_with_something_behind_it_is_refused() -> None:
    with pytest.raises(Damaged, match="where its header says"):
        parse_tensors(memoryview(bytes(GOOD) + b"\0"))


def test_no_flipped_bit_gives_anything_but_a_file_or_a_reason() -> None:
    read = 0
    for at in range(len(GOOD)):
        for bit in range(8):
            damaged = bytearray(GOOD)
            damaged[at] ^= 1 << bit
            try:
                parse_tensors(memoryview(damaged))
                read += 1
            except KvsnapError:
                pass
    assert read >= 7 * 8  # the data have no checksum


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"[]", "not a table"),
        (b"{", "JSON"),
        (b"\xff{}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"x": 1' + b"0" * 5000 + b"}", "JSON"),
        (b'{"\\ud800": 1}', "JSON"),
        (b'{"__metadata__": {"a": "\\udfff"}}', "JSON"),
        (b'{"a": 1, "a": 2}', "duplicate"),
        (b'{"__metadata__": {"a": "1", "a": "1"}}', "duplicate"),
        ({"__metadata__": {"a": 1}}, "metadata"),
        ({"__metadata__": []}, "metadata"),
        ({"x": 1}, "described"),
        ({"x": {"dtype": "F16", "shape": [2]}}, "described"),
        ({"x": entry() | {"more": 1}}, "described"),
        ({"x": entry(dtype=1)}, "described"),
        ({"x": entry(shape="2")}, "described"),
        ({"x": entry(offsets=4)}, "described"),
        ({"x": entry(offsets=[0])}, "impossible"),
        ({"x": entry(shape=[-2])}, "impossible"),
        ({"x": entry(shape=[2.0])}, "impossible"),
        ({"x": entry(shape=[True, 2])}, "impossible"),
        ({"x": entry(shape=[2**63])}, "impossible"),
        ({"x": entry(shape=[1] * 9)}, "impossible"),
        ({"x": entry(shape=[2**62] * 8)}, "has 4 bytes"),
        ({"x": entry(offsets=[4, 0])}, "has -4 bytes"),
        ({"x": entry(offsets=[1, 5])}, "does not start where"),
        ({"x": entry(), "y": entry()}, "does not start where"),
        ({"x": entry(), "y": entry(offsets=[2, 6])}, "does not start where"),
        ({"x": entry(), "y": entry(offsets=[4, 8])}, "where its header says"),
        ({"x": entry(offsets=[2**62, 2**62 + 4])}, "does not start where"),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, reason: str) -> None:
    with pytest.raises(Damaged, match=reason):
        parse_tensors(file_of(header, b"0123"))


def test_element_types_that_are_not_known_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="F6_E2M3"):
        parse_tensors(file_of({"x": entry("F6_E2M3", [4], [0, 3])}, b"012"))


def test_a_header_longer_than_any_cache_has_is_refused_before_it_is_read() -> None:
    with pytest.raises(Damaged, match="a header of"):
        parse_tensors(memoryview(struct.pack("<Q", MAX_HEADER + 1)))


def test_no_metadata_and_null_metadata_are_the_same() -> None:
    assert parse_tensors(file_of({})).metadata == {}
    assert parse_tensors(file_of({"__metadata__": None})).metadata == {}


def test_a_peek_gives_the_header_of_a_file_and_nothing_of_other_bytes() -> None:
    header = peek_header(GOOD)
    assert header is not None
    assert set(header) == {"__metadata__", "x", "y"}
    for other in (b"", b"PK\3\4" + bytes(100), bytes(8), b"\xff" * 40):
        assert peek_header(memoryview(other)) is None
