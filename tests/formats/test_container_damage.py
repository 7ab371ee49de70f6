"""Reading the container with suspicion: damage of any byte and any length is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsnap.formats.container import check_file_digest, header_size, parse
from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.session import SessionRecord, parse_session

Bytes = Callable[..., bytes]


def checked(file: bytes | bytearray) -> None:
    check_file_digest(memoryview(file))
    parse(memoryview(file))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF])
def test_every_flipped_byte_is_found(block_bytes: Bytes, codec: str, mask: int) -> None:
    # 0x20 turns the case of hexadecimal digits and of header keys.
    file = bytearray(block_bytes(codec))
    for at in range(len(file)):
        file[at] ^= mask
        with pytest.raises(Damaged):
            checked(file)
        file[at] ^= mask
    checked(file)


def test_every_byte_of_a_session_file_is_covered(
    session_bytes: Bytes, session_record: Callable[..., SessionRecord]
) -> None:
    file = bytearray(session_bytes(session_record()))
    for at in range(len(file)):
        file[at] ^= 0x01
        with pytest.raises(Damaged):
            checked(file)
        file[at] ^= 0x01
    parse_session(memoryview(file))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_file_cut_anywhere_is_found_by_digest_and_by_parser(
    block_bytes: Bytes, codec: str
) -> None:
    file = block_bytes(codec)
    for length in range(len(file)):
        with pytest.raises(Damaged):
            check_file_digest(memoryview(file[:length]))
        with pytest.raises(Damaged):
            parse(memoryview(file[:length]))


@pytest.mark.parametrize("more", [b"\0", b" ", b"\0" * 64, b"more"])
def test_bytes_after_the_end_are_found_by_digest_and_by_parser(
    block_bytes: Bytes, more: bytes
) -> None:
    file = block_bytes() + more
    with pytest.raises(Damaged, match="digest differs"):
        check_file_digest(memoryview(file))
    with pytest.raises(Damaged, match="where its header says"):
        parse(memoryview(file))


def test_a_file_of_zeros_or_holes_is_damaged() -> None:
    # What a crash leaves where the size was recorded and the data were not.
    for size in (0, 1, 7, 8, 9, 64, 4096):
        with pytest.raises(Damaged):
            checked(bytes(size))


def test_a_zeroed_page_inside_is_found(block_bytes: Bytes) -> None:
    file = bytearray(block_bytes())
    file[-64:] = bytes(64)
    with pytest.raises(Damaged, match="digest differs"):
        checked(file)


@pytest.mark.parametrize(
    "claim", [16 * 2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
)
def test_a_header_length_is_an_unsigned_64_bit_number_with_a_limit(
    block_bytes: Bytes, claim: int
) -> None:
    # A58: read as signed or as 32 bits, these turn negative or small.
    file = claim.to_bytes(8, "little") + block_bytes()[8:]
    for reader in (lambda b: header_size(bytes(b[:8])), check_file_digest, parse):
        with pytest.raises(Damaged, match=f"claims {claim} bytes"):
            reader(memoryview(file))


@pytest.mark.parametrize("claim", [0, 1, 2])
def test_a_header_too_short_for_json_is_damaged(block_bytes: Bytes, claim: int) -> None:
    file = claim.to_bytes(8, "little") + block_bytes()[8:]
    for reader in (check_file_digest, parse):
        with pytest.raises(Damaged):
            reader(memoryview(file))


def test_a_header_longer_than_the_file_is_damaged(block_bytes: Bytes) -> None:
    file = block_bytes()
    for claim in (len(file) - 7, len(file), 16 * 2**20):
        with pytest.raises(Damaged, match="the file is cut"):
            parse(memoryview(claim.to_bytes(8, "little") + file[8:]))


def test_no_bytes_at_all_and_another_kind_of_file_are_damaged() -> None:
    for data in (b"", b"GGUF" + bytes(100), b"PK\3\4" + bytes(100), b"{" * 300, b"\x80\4\x95" * 90):
        with pytest.raises(KvsnapError) as caught:
            checked(data)
        assert type(caught.value) is Damaged
