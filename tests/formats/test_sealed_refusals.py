"""Sealed files: what stands outside cannot be changed, and nothing passes for what it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3

from kvsnap.formats.block import parse_block
from kvsnap.formats.container import Packed, Tensor, check_file_digest, pack, parse
from kvsnap.formats.errors import Damaged, KvsnapError, Sealed, Unsupported, UsageError
from kvsnap.formats.pin import PinRecord, pack_pin
from kvsnap.formats.sealed import (
    MAX_PLAIN,
    is_sealed,
    parse_sealed,
    seal,
)
from tests.formats.sealing import (
    CLEAR,
    GOLDEN,
    NAME,
    OTHER,
    SALT,
    STRANGER,
    TENANT,
    TEXT,
    golden,
    joined,
    numbers,
    opened,
    packed,
    sealed,
)

_FILE = re.compile(rb'"file":"([0-9a-f]{64})"')


def redigested(file: bytes) -> bytes:
    """The file with its digest made right again, where it still has the field."""
    found = _FILE.search(file)
    if found is None:
        return file
    digest = blake3(file[: found.start(1)] + b"0" * 64 + file[found.end(1) :]).hexdigest()
    return file[: found.start(1)] + digest.encode() + file[found.end(1) :]


def test_every_flipped_bit_is_refused_though_the_digest_is_right_again() -> None:
    file = sealed(b"short", salt=SALT)
    refused = 0
    for at in range(len(file)):
        for bit in range(8):
            changed = bytearray(file)
            changed[at] ^= 1 << bit
            again = redigested(bytes(changed))
            if again == file:  # the flip was in the digest, which has been mended
                continue
            with pytest.raises((Damaged, Unsupported)):
                opened(again)
            refused += 1
    assert refused > 8 * (len(file) - 64)


PLAUSIBLE = [
    *((field, OTHER.hex()) for field in ("name", "parent", "root_id", "salt", "last", "tenant_id")),
    *(("start", text) for text in ("0", "064")),
    *(("tokens", "15"), ("holds", "state"), ("note", "")),
]
"""Each field with another value that could well stand there, and one field too many."""


@pytest.mark.parametrize(("field", "value"), PLAUSIBLE)
def test_what_stands_in_the_clear_cannot_be_changed(
    field: str, value: str, resign: Callable[..., bytes]
) -> None:
    def change(header: dict[str, Any], data: bytearray) -> None:
        header["__metadata__"][field] = value

    file = resign(sealed(), change)
    parse_sealed(memoryview(file))  # looks well
    with pytest.raises(Sealed if field == "tenant_id" else Damaged):
        opened(file)


def test_a_field_more_or_less_among_the_clear_tensors_is_refused(
    resign: Callable[..., bytes],
) -> None:
    def drop(header: dict[str, Any], data: bytearray) -> None:
        del header["sizes"], data[-24:]

    def rename(header: dict[str, Any], data: bytearray) -> None:
        header["files"] = header.pop("sizes")

    def reshape(header: dict[str, Any], data: bytearray) -> None:
        header["sizes"]["shape"] = [3, 1]

    def retype(header: dict[str, Any], data: bytearray) -> None:
        header["sizes"] |= {"dtype": "U32", "shape": [6]}

    def change(header: dict[str, Any], data: bytearray) -> None:
        data[-24] ^= 1

    for edit in (drop, rename, reshape, retype, change):
        with pytest.raises(Damaged, match="does not open"):
            opened(resign(sealed(), edit))


def mixed(head: bytes, part: str, donor: bytes) -> bytes:
    """One file with a tensor of another."""
    one, two = parse(memoryview(head)), parse(memoryview(donor))
    fields = {key: value for key, value in one.metadata.items() if key != "file"}
    tensors = {**one.tensors, part: two.tensors[part]}
    return joined(pack(fields, list(tensors.items())))


@pytest.mark.parametrize("salt", [SALT, OTHER])
def test_a_part_of_another_file_is_refused(salt: bytes) -> None:
    one = sealed()
    two = joined(seal(packed(TEXT), CLEAR, TENANT, [("sizes", numbers(5, 6, 8))], salt=salt))
    assert opened(mixed(one, "sealed", one)) == TEXT
    for part in ("sealed", "sizes"):
        with pytest.raises(Damaged, match="does not open"):
            opened(mixed(one, part, two))


def test_a_file_under_another_blocks_name_is_refused(resign: Callable[..., bytes]) -> None:
    def change(header: dict[str, Any], data: bytearray) -> None:
        header["__metadata__"] |= {"name": OTHER.hex(), "parent": NAME.hex(), "start": "80"}

    with pytest.raises(Damaged, match="does not open"):
        opened(resign(sealed(), change))


def test_without_the_tenants_key_it_is_sealed_and_says_so() -> None:
    with pytest.raises(Sealed, match="no tenant key") as caught:
        opened(sealed(), None)
    assert "--tenant-key-file" in caught.value.hint
    with pytest.raises(Sealed, match="another tenant's key"):
        opened(sealed(), STRANGER)


def test_a_strangers_key_under_a_strangers_id_opens_nothing(resign: Callable[..., bytes]) -> None:
    def change(header: dict[str, Any], data: bytearray) -> None:
        header["__metadata__"]["tenant_id"] = STRANGER.tenant_id

    with pytest.raises(Damaged, match="does not open"):
        opened(resign(sealed(), change), STRANGER)


def test_a_cut_file_is_refused_at_every_length() -> None:
    file = sealed()
    for size in range(len(file)):
        with pytest.raises(Damaged):
            opened(file[:size])
        with pytest.raises(Damaged):
            parse_sealed(memoryview(file[:size]))


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, len(TEXT) + 15])
def test_a_sealed_part_cut_with_its_header_is_refused(size: int) -> None:
    container = parse(memoryview(sealed()))
    fields = {key: value for key, value in container.metadata.items() if key != "file"}
    data = bytes(container.tensors["sealed"].data[:size])
    cut = ("sealed", Tensor("U8", (size,), data))
    file = joined(pack(fields, [cut, ("sizes", container.tensors["sizes"])]))
    with pytest.raises(Damaged, match="does not open" if size >= 16 else f"of {size} bytes"):
        opened(file)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_plain_file_does_not_pass_for_a_sealed_one(name: str) -> None:
    plain, clear = golden(name)
    assert not is_sealed(memoryview(plain))
    assert is_sealed(memoryview(joined(seal(packed(plain), clear, TENANT))))
    with pytest.raises(Damaged, match="where a sealed belongs"):
        parse_sealed(memoryview(plain))


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, b"\1" + bytes(7), bytes(8)])
def test_what_is_no_file_is_not_sealed(data: bytes) -> None:
    assert not is_sealed(memoryview(data))


def test_a_name_cannot_make_a_file_look_sealed() -> None:
    file = joined(pack_pin(PinRecord("session", "default", '"kind":"sealed"')))
    assert not is_sealed(memoryview(file))


def test_a_sealed_file_does_not_pass_for_a_plain_one() -> None:
    plain, clear = golden("block-raw")
    file = joined(seal(packed(plain), clear, TENANT))
    with pytest.raises(Damaged, match="where a block belongs"):
        parse_block(memoryview(file))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kvsnap": "9"}, Unsupported, "format version '9'"),
        ({"cipher": "rot13"}, Unsupported, "another cipher"),
        ({"holds": "sealed"}, Damaged, "not known"),
        ({"holds": "session"}, Damaged, "other names"),
        ({"name": ""}, Damaged, "other names"),
        ({"parent": "00" * 31}, Damaged, "other names"),
        ({"root_id": ""}, Damaged, "other names"),
        ({"root_id": "00" * 31}, Damaged, "root id"),
        ({"last": "00"}, Damaged, "last block"),
        ({"tokens": "65537"}, Damaged, "65537 token ids"),
        ({"start": "-1"}, Damaged, "not a number"),
        ({"salt": "00" * 31}, Damaged, "64 hex"),
        ({"tenant_id": "default"}, Damaged, "hexadecimal"),
    ],
)
def test_a_header_that_no_seal_makes_is_refused(
    change: dict[str, str],
    error: type[KvsnapError],
    match: str,
    resign: Callable[..., bytes],
) -> None:
    file = resign(sealed(), lambda header, data: header["__metadata__"].update(change))
    check_file_digest(memoryview(file))
    with pytest.raises(error, match=match):
        parse_sealed(memoryview(file))


@pytest.mark.parametrize("field", sorted(set(parse(memoryview(sealed())).metadata) - {"file"}))
def test_a_missing_field_is_refused(field: str, resign: Callable[..., bytes]) -> None:
    file = resign(sealed(), lambda header, data: header["__metadata__"].pop(field))
    with pytest.raises(Damaged, match=field):
        parse_sealed(memoryview(file))


@pytest.mark.parametrize("entry", [None, ("U64", (2,)), ("U8", (4, 4))])
def test_a_sealed_part_of_another_form_is_refused(
    entry: tuple[str, tuple[int, ...]] | None,
) -> None:
    fields = {k: v for k, v in parse(memoryview(sealed())).metadata.items() if k != "file"}
    tensors = [] if entry is None else [("sealed", Tensor(*entry, bytes(16)))]
    with pytest.raises(Damaged, match="no sealed part"):
        parse_sealed(memoryview(joined(pack(fields, tensors))))


def test_what_cannot_be_sealed_is_refused_before_anything_is_allocated() -> None:
    with pytest.raises(UsageError, match="cannot be sealed"):
        seal(Packed((), MAX_PLAIN + 1, ""), CLEAR, TENANT)
    with pytest.raises(UsageError, match="another tenant"):
        seal(packed(TEXT), CLEAR, STRANGER)
    assert MAX_PLAIN == 2**36 - 32
