"""Headers that somebody wrote on purpose: the digest is right, the header lies."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from kvsnap.formats.container import check_file_digest, parse, parse_header
from kvsnap.formats.errors import Damaged

Sign = Callable[..., bytes]
META = {"file": "0" * 64}


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    as_list = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": as_list, "data_offsets": list(offsets)}


def refused(
    sign: Sign, header: dict[str, Any], data: bytes = bytes(4), match: str = "tensor"
) -> None:
    file = memoryview(sign(header, data))
    check_file_digest(file)  # so that it is the parser that refuses
    with pytest.raises(Damaged, match=match) as caught:
        parse(file)
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 200


def test_the_header_that_the_others_bend_is_accepted(sign: Sign) -> None:
    file = memoryview(sign({"__metadata__": META, "x": entry()}, bytes(4)))
    check_file_digest(file)
    assert parse(file).tensors["x"].shape == (4,)


@pytest.mark.parametrize(
    "shape",
    [
        (-4,),
        (-2, -2),
        (True, 4),
        (4.0,),
        ("4",),
        (None,),
        (2**63, 0),
        (2**64,),
        ([4],),
        4,
        "4",
        None,
        {"4": 4},
        (1,) * 9 + (4,),
    ],
    ids=repr,
)
def test_an_impossible_shape_is_damaged(sign: Sign, shape: Any) -> None:
    refused(sign, {"__metadata__": META, "x": entry(shape=shape)})


@pytest.mark.parametrize(
    "offsets",
    [
        (0, 3),
        (0, 5),
        (4, 0),
        (4, 8),
        (-4, 0),
        (0.0, 4.0),
        (False, 4),
        ("0", "4"),
        (2**63, 2**63 + 4),
        (2**64 - 4, 2**64),
        (0,),
        (0, 4, 8),
        (),
        (None, 4),
        ([0], [4]),
    ],
    ids=repr,
)
def test_impossible_offsets_are_damaged(sign: Sign, offsets: Any) -> None:
    refused(sign, {"__metadata__": META, "x": entry(offsets=offsets)})


@pytest.mark.parametrize("dtype", ["I8", "F64", "u8", "", None, 1, ["U8"], {}], ids=repr)
def test_an_unknown_dtype_is_damaged(sign: Sign, dtype: Any) -> None:
    refused(sign, {"__metadata__": META, "x": entry(dtype=dtype)})


@pytest.mark.parametrize("value", [None, [], 1, "U8", {}, {"dtype": "U8"}, [0, 4]], ids=repr)
def test_what_describes_no_tensor_is_damaged(sign: Sign, value: Any) -> None:
    refused(sign, {"__metadata__": META, "x": value})


def test_a_key_that_no_tensor_has_is_damaged(sign: Sign) -> None:
    refused(sign, {"__metadata__": META, "x": entry() | {"codec": "raw"}})


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 4), (0, 4)],  # two names for the same bytes
        [(0, 4), (2, 6)],  # overlap
        [(0, 4), (6, 10)],  # hole
        [(2, 6), (6, 10)],  # hole at the front
        [(0, 4), (4, 8), (4, 8)],
    ],
    ids=repr,
)
def test_tensors_must_lie_end_to_end(sign: Sign, spans: list[tuple[int, int]]) -> None:
    header = {f"t{n}": entry(offsets=span) for n, span in enumerate(spans)}
    data = bytes(max(end for _, end in spans))
    refused(sign, {"__metadata__": META, **header}, data, "does not start where")


@pytest.mark.parametrize("size", [0, 3, 5])
def test_data_must_be_as_long_as_the_header_says(sign: Sign, size: int) -> None:
    refused(sign, {"__metadata__": META, "x": entry()}, bytes(size), "where its header says")


@pytest.mark.parametrize("value", [1, None, True, ["x"], {"x": "y"}], ids=repr)
def test_metadata_holds_text_only(sign: Sign, value: Any) -> None:
    refused(sign, {"__metadata__": META | {"x": value}}, b"", "table of strings")


@pytest.mark.parametrize("value", [[], "x", 1, None], ids=repr)
def test_metadata_is_a_table(value: Any) -> None:
    text = json.dumps({"__metadata__": value}).encode()
    with pytest.raises(Damaged, match="table of strings"):
        parse(memoryview(struct.pack("<Q", len(text)) + text))


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'{"__metadata__":{"file":"x","file":"y"}}',
        b'{"x":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        b'{"file":1,"\\u0066ile":2}',  # one key, spelled twice
    ],
)
def test_duplicate_keys_are_damaged(text: bytes) -> None:
    with pytest.raises(Damaged, match="duplicate keys"):
        parse_header(text)


@pytest.mark.parametrize(
    "text", [b"", b"null", b"[]", b"1", b'"x"', b"{}{}", b"{,}", b'{"a":}', b'{"\xff":1}', b"\0"]
)
def test_what_is_no_json_table_is_damaged(text: bytes) -> None:
    with pytest.raises(Damaged):
        parse_header(text)


@pytest.mark.parametrize("bomb", [b"[", b'{"a":', b'{"a":[', b'[{"a":'])
def test_a_deeply_nested_header_is_damaged_not_a_crash(bomb: bytes) -> None:
    for depth in (900, 10**6):
        with pytest.raises(Damaged):
            parse(memoryview(struct.pack("<Q", len(bomb) * depth) + bomb * depth))


def test_a_file_without_exactly_one_digest_is_damaged(sign: Sign) -> None:
    none: dict[str, Any] = {"__metadata__": {"a": "b"}}
    two = {"__metadata__": META, "x": {"file": "1" * 64}}
    upper = {"__metadata__": {"file": "A" * 64}}
    for header in (none, two, upper):
        with pytest.raises(Damaged, match="no file digest"):
            check_file_digest(memoryview(sign(header)))


@pytest.mark.parametrize("claim", [2**31 - 1, 2**31, 2**32, 2**40, 2**62])
def test_a_claimed_size_allocates_nothing(sign: Sign, claim: int) -> None:
    file = memoryview(sign({"__metadata__": META, "x": entry("U8", (claim,), (0, claim))}, b"1234"))
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match=f"header says {claim + len(file) - 4}"):
            parse(file)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("digits", [1, 18, 3000])
def test_a_shape_of_a_million_sizes_is_refused_at_once(sign: Sign, digits: int) -> None:
    # Multiplied out, this shape takes minutes: a denial of service by one small file.
    sizes = ",".join(["9" * digits] * (10**7 // (digits + 10)))
    file = sign({"__metadata__": META, "x": entry(shape="@")}, bytes(4))
    (length,) = struct.unpack_from("<Q", file)
    header = file[8 : 8 + length].replace(b'"@"', f"[{sizes}]".encode())
    started = time.perf_counter()
    with pytest.raises(Damaged, match="not described"):
        parse(memoryview(struct.pack("<Q", len(header)) + header))
    assert time.perf_counter() - started < 10
