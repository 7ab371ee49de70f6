"""Writing the container: canonical bytes, aligned data, a digest over all of them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import numpy as np
import pytest
from blake3 import blake3
from safetensors.numpy import load

from kvsnap.formats import container
from kvsnap.formats.container import ALIGNMENT, Packed, Tensor, check_file_digest, pack, parse
from kvsnap.formats.errors import UsageError

IDS = Tensor("U32", (3,), np.arange(3, dtype="<u4"))
BYTES = Tensor("U8", (2, 5), np.arange(10, dtype=np.uint8).reshape(2, 5))
Whole = Callable[[Packed], bytes]


def test_what_is_packed_is_parsed_back(whole: Whole) -> None:
    file = whole(pack({"b": "2", "a": 'é\n"\\\0'}, [("z", IDS), ("y", BYTES)]))
    found = parse(memoryview(file))
    assert found.metadata == {"a": 'é\n"\\\0', "b": "2", "file": found.metadata["file"]}
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in found.tensors.items()} == {
        "z": ("U32", (3,), IDS.data.tobytes()),
        "y": ("U8", (2, 5), BYTES.data.tobytes()),
    }


def test_equal_content_gives_equal_bytes_in_whatever_order_fields_come(whole: Whole) -> None:
    one = whole(pack({"a": "1", "b": "2"}, [("x", IDS), ("y", BYTES)]))
    two = whole(pack({"b": "2", "a": "1"}, [("x", IDS), ("y", BYTES)]))
    assert one == two


def test_tensors_keep_the_order_given(whole: Whole) -> None:
    found = parse(memoryview(whole(pack({}, [("z", IDS), ("a", BYTES)]))))
    assert list(found.tensors) == ["z", "a"]


@pytest.mark.parametrize("padding", range(0, 130, 13))
def test_data_starts_at_a_multiple_of_64_bytes(whole: Whole, padding: int) -> None:
    file = whole(pack({"pad": "x" * padding}, [("x", IDS)]))
    (length,) = struct.unpack_from("<Q", file)
    assert (8 + length) % ALIGNMENT == 0
    assert file[8:9] == b"{"
    assert np.array_equal(load(file)["x"], IDS.data)


def test_the_file_digest_is_over_all_bytes_with_the_field_zeroed(whole: Whole) -> None:
    packed = pack({"a": "1"}, [("x", IDS)])
    file = whole(packed)
    digest = packed.file_digest.encode()
    assert file.count(digest) == 1
    assert blake3(file.replace(digest, b"0" * 64)).hexdigest() == packed.file_digest
    assert check_file_digest(memoryview(file)) == packed.file_digest


def test_size_is_the_number_of_bytes(whole: Whole) -> None:
    for tensors in ([], [("x", IDS)], [("x", IDS), ("e", Tensor("U8", (0,), b"")), ("y", BYTES)]):
        packed = pack({}, tensors)
        assert packed.size == len(whole(packed))


def test_tensor_data_is_not_copied_to_be_written() -> None:
    rows = np.zeros((2, 3), np.uint8)
    packed = pack({}, [("x", Tensor("U8", (2, 3), rows))])
    assert np.shares_memory(np.frombuffer(packed.buffers[1], np.uint8), rows)


def test_tensor_data_is_not_copied_to_be_read(whole: Whole) -> None:
    file = whole(pack({}, [("x", IDS)]))
    data = np.frombuffer(parse(memoryview(file)).tensors["x"].data, "<u4")
    assert np.shares_memory(data, np.frombuffer(file, np.uint8))


def test_an_empty_tensor_has_no_bytes_and_is_kept(whole: Whole) -> None:
    empty = Tensor("U32", (0,), np.empty(0, "<u4"))
    found = parse(memoryview(whole(pack({}, [("e", empty), ("x", IDS), ("f", empty)]))))
    assert {name: t.shape for name, t in found.tensors.items()} == {"e": (0,), "x": (3,), "f": (0,)}


def test_a_field_that_quotes_a_digest_is_not_taken_for_the_digest(whole: Whole) -> None:
    # The chat in a session's notes may be about these very files.
    quoted = json.dumps({"file": "0" * 64}, separators=(",", ":"))
    packed = pack({"a": quoted, "z": f'"file":"{"1" * 64}"'}, [("x", IDS)])
    assert check_file_digest(memoryview(whole(packed))) == packed.file_digest


def test_a_field_that_repeats_the_zeroed_digest_stays_as_it_is(whole: Whole) -> None:
    # A first block's parent is 64 zeros, as the digest field is while the file is digested.
    packed = pack({"a": "0" * 64, "parent": "0" * 64}, [("x", IDS)])
    metadata = parse(memoryview(whole(packed))).metadata
    assert metadata == {"a": "0" * 64, "file": packed.file_digest, "parent": "0" * 64}


def test_a_header_that_no_reader_would_take_is_not_written(
    monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    monkeypatch.setattr(container, "MAX_HEADER", 1016)
    parse(memoryview(whole(pack({"notes": "x" * 850}, []))))
    with pytest.raises(UsageError, match="1080 bytes, more than 1016"):
        pack({"notes": "x" * 930}, [])
