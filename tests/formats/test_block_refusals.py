"""Block files whose digest is right and whose record is not: one clear line each (A57, A66)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.block import parse_block
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.session import SessionRecord, parse_session

Bytes = Callable[..., bytes]


def with_field(**fields: str | None) -> Callable[[dict[str, Any], bytearray], None]:
    def change(header: dict[str, Any], data: bytearray) -> None:
        header["__metadata__"].update(fields)
        for key in [key for key, value in fields.items() if value is None]:
            del header["__metadata__"][key]

    return change


def refusal(file: bytes) -> KvsnapError:
    buffer = memoryview(file)
    check_file_digest(buffer)
    with pytest.raises(KvsnapError) as caught:
        parse_block(buffer).check_content()
    assert "\n" not in caught.value.what
    assert len(caught.value.what) < 200
    return caught.value


@pytest.mark.parametrize("version", ["0", "2", "99", "", "0.0", "00", "x" * 10**5, "\x1b[31m\n"])
def test_another_format_version_is_refused_by_name(
    block_bytes: Bytes, resign: Bytes, version: str
) -> None:
    error = refusal(resign(block_bytes(), with_field(kvsnap=version)))
    assert type(error) is Unsupported
    assert "format version" in error.what
    assert "reads version 1" in error.what
    assert len(version) > 20 or repr(version) in error.what
    assert error.hint


@pytest.mark.parametrize("codec", ["", "lz4", "Raw", "os:system", "kvsnap.formats.codecs.raw:Raw"])
def test_an_unknown_codec_is_refused_and_the_known_ones_are_named(
    block_bytes: Bytes, resign: Bytes, codec: str
) -> None:
    error = refusal(resign(block_bytes(), with_field(codec=codec)))
    assert type(error) is Unsupported
    assert error.what.startswith("codec ")
    assert "raw" in error.hint
    assert "zstd" in error.hint


@pytest.mark.parametrize("fidelity", ["", "Exact", "kivi@1;bits=2", "zstd@1", "raw"])
def test_another_fidelity_is_refused(block_bytes: Bytes, resign: Bytes, fidelity: str) -> None:
    # Lossless codecs may stand in any chain; whose it is the reader's identity decides.
    for codec, kind in (("zstd", Damaged), ("q8", Damaged), ("kivi", Unsupported)):
        error = refusal(resign(block_bytes(), with_field(fidelity=fidelity, codec=codec)))
        assert type(error) is (Unsupported if fidelity.startswith("q8@") else kind)


@pytest.mark.parametrize("fidelity", ["q8@2", "q8@1;bits=2", "q8", "q8@", "q4@1", "q4@1;step=99"])
def test_a_fidelity_that_this_version_does_not_write_is_no_damage(
    block_bytes: Bytes, resign: Bytes, fidelity: str
) -> None:
    codec = fidelity[:2]
    error = refusal(resign(block_bytes(), with_field(fidelity=fidelity, codec=codec)))
    assert type(error) is Unsupported


@pytest.mark.parametrize("kind", ["", "session", "Block", "manifest"])
def test_another_kind_of_file_is_not_a_block(block_bytes: Bytes, resign: Bytes, kind: str) -> None:
    error = refusal(resign(block_bytes(), with_field(kind=kind)))
    assert type(error) is Damaged
    assert error.what == f"a file of kind {kind!r} where a block belongs"


def test_a_session_in_a_blocks_place_is_refused_and_the_other_way_round(
    block_bytes: Bytes, session_bytes: Bytes, session_record: Callable[..., SessionRecord]
) -> None:
    assert "'session'" in refusal(session_bytes(session_record())).what
    with pytest.raises(Damaged, match="'block' where a session belongs"):
        parse_session(memoryview(block_bytes()))


@pytest.mark.parametrize(
    "field",
    ["codec", "content", "extras", "fidelity", "identity", "kind", "kvsnap", "name", "parent",
     "root_id", "start"],
)  # fmt: skip
def test_a_missing_field_is_damaged_and_named(
    block_bytes: Bytes, resign: Bytes, field: str
) -> None:
    error = refusal(resign(block_bytes(), with_field(**{field: None})))
    assert type(error) is Damaged
    assert error.what == f"the header has no field {field!r}"


@pytest.mark.parametrize("field", ["name", "parent", "root_id"])
@pytest.mark.parametrize("value", ["", "00" * 31, "00" * 33, "0" * 63, "AB" * 32, "0x" * 32, "é"])
def test_a_digest_is_64_lower_case_hexadecimal_digits(
    block_bytes: Bytes, resign: Bytes, field: str, value: str
) -> None:
    error = refusal(resign(block_bytes(), with_field(**{field: value})))
    assert type(error) is Damaged
    assert f"{field!r} is not" in error.what


@pytest.mark.parametrize("value", ["0", "AB", "0x", " 00", "00 ", "zz", "é"])
def test_extras_are_lower_case_hexadecimal(block_bytes: Bytes, resign: Bytes, value: str) -> None:
    error = refusal(resign(block_bytes(), with_field(extras=value)))
    assert error.what == "header field 'extras' is not lower-case hexadecimal"


@pytest.mark.parametrize("value", ["", "-1", "+1", " 1", "1.0", "1e3", "0x1", "١", "9" * 19, "1_0"])
def test_a_start_that_is_no_number_is_damaged(
    block_bytes: Bytes, resign: Bytes, value: str
) -> None:
    error = refusal(resign(block_bytes(), with_field(start=value)))
    assert error.what == "header field 'start' is not a number"


def test_numbers_beyond_32_bits_are_read_exactly(block_bytes: Bytes, resign: Bytes) -> None:
    for start in (2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**18 - 1):
        file = resign(block_bytes(), with_field(start=str(start)))
        assert parse_block(memoryview(file)).record.start == start


@pytest.mark.parametrize("dtype", ["U8", "F32"])
def test_token_ids_of_another_type_are_damaged(
    block_bytes: Bytes, resign: Bytes, dtype: str
) -> None:
    def retype(header: dict[str, Any], data: bytearray) -> None:
        header["token_ids"].update(dtype=dtype, shape=[16 if dtype == "U8" else 4])

    assert refusal(resign(block_bytes(), retype)).what == "the file has no tensor of token ids"


@pytest.mark.parametrize("shape", [[2, 2], [1, 4], []])
def test_token_ids_of_another_shape_are_damaged(
    block_bytes: Bytes, resign: Bytes, shape: list[int]
) -> None:
    error = refusal(
        resign(block_bytes(), lambda header, _: header["token_ids"].update(shape=shape))
    )
    assert type(error) is Damaged


@pytest.mark.parametrize("name", ["other.k", "full.q", "full.kk", "zz", "full"])
def test_a_tensor_that_the_layout_does_not_have_is_damaged_and_named(
    block_bytes: Bytes, resign: Bytes, name: str
) -> None:
    def add(header: dict[str, Any], data: bytearray) -> None:
        end = len(data)
        header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
        data += bytes(4)

    error = refusal(resign(block_bytes(), add))
    assert error.what == f"tensors that the layout does not have: [{name!r}]"


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_in_the_files_place_runs_nothing(tmp_path: Path, protocol: int) -> None:
    bomb = pickle.dumps(Canary(tmp_path / "canary"), protocol)
    framed = len(bomb).to_bytes(8, "little") + bomb
    for data in (bomb, framed, framed + bytes(64)):
        for reader in (check_file_digest, parse_block, parse_session):
            with pytest.raises(Damaged):
                reader(memoryview(data))
    assert not (tmp_path / "canary").exists()
    pickle.loads(bomb)
    assert (tmp_path / "canary").exists()  # the bomb was a live one


def test_a_pickle_in_a_field_or_tensor_runs_nothing(
    tmp_path: Path, block_bytes: Bytes, resign: Bytes
) -> None:
    bomb = pickle.dumps(Canary(tmp_path / "canary"), 0)

    def plant(header: dict[str, Any], data: bytearray) -> None:
        header["__metadata__"]["identity"] = bomb.decode("ascii")
        data[16 : 16 + len(bomb)] = bomb[: len(data) - 16]

    assert type(refusal(resign(block_bytes(), plant))) is Damaged
    assert not (tmp_path / "canary").exists()
