"""The zip of torch.save: taken apart without belief, and put together as torch does."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.interchange import torch_zip
from kvsnap.formats.interchange.torch_zip import read_entries, write_entries

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
NAMES = sorted(path.name for path in SAMPLES.glob("hf_*.pt"))
ENTRIES = [("a/data.pkl", b"N."), ("a/data/0", bytes(range(100))), ("a/version", b"3\n")]
GOOD = write_entries(ENTRIES)
END, END64, LOCATOR = -22, -98, -42
DIRECTORY = struct.unpack_from("<I", GOOD, len(GOOD) - 6)[0]


def changed(at: int, data: bytes, whole: bytes = GOOD) -> memoryview:
    """`at` from the end, where it is negative."""
    found = bytearray(whole)
    at %= len(found)
    found[at : at + len(data)] = data
    return memoryview(found)


@pytest.mark.parametrize("name", NAMES)
def test_entries_of_a_sample_written_again_are_the_sample(name: str) -> None:
    whole = (SAMPLES / name).read_bytes()
    entries = read_entries(memoryview(whole))
    assert write_entries(list(entries.items())) == whole
    with zipfile.ZipFile(SAMPLES / name) as theirs:
        assert {n: theirs.read(n) for n in theirs.namelist()} == {
            n: bytes(data) for n, data in entries.items()
        }


@given(st.dictionaries(st.text("abcé._", min_size=3), st.binary(max_size=200), max_size=8))
def test_what_is_written_is_read_here_and_by_python(contents: dict[str, bytes]) -> None:
    written = write_entries(list(contents.items()))
    assert {n: bytes(d) for n, d in read_entries(memoryview(written)).items()} == contents
    with zipfile.ZipFile(io.BytesIO(written)) as theirs:
        assert theirs.testzip() is None
        assert theirs.namelist() == list(contents)


def test_entries_begin_at_multiples_of_64() -> None:
    for data in read_entries(memoryview(GOOD)).values():
        assert GOOD.index(bytes(data)) % 64 == 0


def test_offsets_beyond_32_bits_are_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a file of more than 4 GB: the directory has 0xffffffff and the number behind it."""
    saved = io.BytesIO()
    torch.save({"x": torch.arange(7)}, saved)
    entries = list(read_entries(memoryview(saved.getvalue())).items())
    monkeypatch.setattr(torch_zip, "WIDE_FROM", 64)
    wide = write_entries(entries)
    assert len(wide) > len(saved.getvalue())
    assert wide.count(b"\xff\xff\xff\xff\1\0\x08\0") == 0  # name and field stand behind it
    assert list(read_entries(memoryview(wide)).items()) == entries
    assert torch.equal(torch.load(io.BytesIO(wide))["x"], torch.arange(7))


def test_zip64_sizes_of_other_writers_are_read() -> None:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(file, "w") as zipped,
        zipped.open("a/data.pkl", "w", force_zip64=True) as entry,
    ):
        entry.write(b"N.")
    assert bytes(read_entries(memoryview(file.getvalue()))["a/data.pkl"]) == b"N."


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_compressed_entry_is_refused_and_never_grows(method: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as zipped:
        zipped.writestr("a/data.pkl", bytes(10**7))
    with pytest.raises(Unsupported, match="compressed"):
        read_entries(memoryview(file.getvalue()))


def test_a_zip_that_is_cut_is_refused_at_every_length() -> None:
    assert len(read_entries(memoryview(GOOD))) == 3
    for size in range(len(GOOD)):
        with pytest.raises(Damaged):
            read_entries(memoryview(GOOD)[:size])


@pytest.mark.parametrize("name", ["hf_v5_dict.pt"])
def test_a_sample_that_is_cut_is_refused(name: str) -> None:
    whole = memoryview((SAMPLES / name).read_bytes())
    for size in (*range(0, len(whole), 1009), *range(len(whole) - 2000, len(whole))):
        with pytest.raises(Damaged):
            read_entries(whole[:size])


def test_bytes_in_front_or_behind_are_refused() -> None:
    for odd in (b"x" + GOOD, GOOD + b"x", GOOD + bytes(22)):
        with pytest.raises(Damaged):
            read_entries(memoryview(odd))


def test_every_flipped_bit_is_refused_or_changes_nothing() -> None:
    """CRC and cross-checks leave times, attributes, paddings and versions: what nobody reads."""
    same = 0
    for at in range(len(GOOD)):
        for bit in range(8):
            damaged = bytearray(GOOD)
            damaged[at] ^= 1 << bit
            try:
                entries = read_entries(memoryview(damaged))
            except KvsnapError:
                continue
            assert [(n, bytes(d)) for n, d in entries.items()] == ENTRIES
            same += 1
    assert 100 < same < len(GOOD) * 4


def entries_named(*names: str) -> memoryview:
    return memoryview(write_entries([(name, b"x") for name in names]))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "a/../b", "..", "a//b", "a/", "a\\b", "a/\0", ".", "a/./b", ""]
)
def test_a_name_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(Damaged, match="named"):
        read_entries(entries_named(name))


def test_a_name_that_is_no_text_is_refused() -> None:
    whole = bytes(entries_named("ab")).replace(b"ab", b"\xff\xfe")
    with pytest.raises(Damaged, match="no text"):
        read_entries(memoryview(whole))


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(Damaged, match="two entries"):
        read_entries(entries_named("a", "b", "a"))


def test_entries_that_lie_over_one_another_are_refused() -> None:
    first, second = DIRECTORY, DIRECTORY + 46 + len("a/data.pkl")
    whole = bytearray(GOOD)
    whole[second + 42 : second + 46] = whole[first + 42 : first + 46]
    with pytest.raises(Damaged, match=r"not what the zip's directory says|over another"):
        read_entries(memoryview(whole))
    twice = bytearray(write_entries([("a", b"x"), ("a", b"x")]))
    at = struct.unpack_from("<I", twice, len(twice) - 6)[0] + 47
    twice[at + 42 : at + 46] = bytes(4)
    with pytest.raises(Damaged, match="over another"):
        read_entries(memoryview(twice))


FIRST = DIRECTORY
SECOND = DIRECTORY + 46 + len("a/data.pkl")


@pytest.mark.parametrize(
    ("at", "data", "reason"),
    [
        (END, b"PK\5\7", "does not end"),
        (END + 20, b"\1\0", "does not end"),
        (END + 4, b"\1\0", "one of several"),
        (END + 8, b"\2\0", "one of several"),
        (LOCATOR + 16, b"\2", "two ends"),
        (LOCATOR + 8, b"\xff" * 8, "two ends"),
        (END64, b"PK\6\5", "zip64 end"),
        (END64 + 4, b"\xff" * 8, "zip64 end"),
        (END64 + 24, b"\4", "zip64 end"),
        (END64 + 24, b"\4" + bytes(7) + b"\4", "not where its end says"),
        (END64 + 24, b"\2" + bytes(7) + b"\2", "more entries"),
        (END64 + 24, b"\xff" * 16, "not where its end says"),
        (END64 + 40, b"\xff" * 8, "not where its end says"),
        (END64 + 48, b"\xff" * 8, "not where its end says"),
        (FIRST, b"PK\1\3", "directory is damaged"),
        (FIRST + 8, b"\1\x08", "flags 0x801"),
        (FIRST + 10, b"\x08", "compressed"),
        (FIRST + 20, b"\3", "compressed"),
        (FIRST + 20, b"\3\0\0\0\3\0\0\0", "its CRC differs"),
        (FIRST + 20, b"\xff" * 8, "how long it is"),
        (FIRST + 28, b"\xff\xff", "directory is damaged"),
        (FIRST + 30, b"\xff\xff", "directory is damaged"),
        (FIRST + 32, b"\1", "directory is damaged"),
        (FIRST + 34, b"\1", "directory is damaged"),
        (FIRST + 42, b"\xff" * 4, "how long it is"),
        (FIRST + 42, b"\xfe" * 4, "goes beyond"),
        (FIRST + 42, b"\4", "not what the zip's directory says"),
        (SECOND + 20, b"\xff\xff\0\0\xff\xff\0\0", "goes beyond"),
        (0, b"PK\3\5", "not what the zip's directory says"),
        (8, b"\x08", "not what the zip's directory says"),
        (14, b"\1", "not what the zip's directory says"),
        (30, b"b", "not what the zip's directory says"),
        (28, b"\xff\xff", "goes beyond"),
        (64, b"M", "its CRC differs"),
    ],
)
def test_a_zip_that_lies_is_refused(at: int, data: bytes, reason: str) -> None:
    with pytest.raises(KvsnapError, match=reason):
        read_entries(changed(at, data))


def test_a_directory_that_ends_early_is_refused() -> None:
    whole = write_entries([("a" * 100, b"x"), ("b" * 100, b"x")])
    with pytest.raises(Damaged, match="fewer entries"):
        read_entries(changed(END64 + 24, b"\3" + bytes(7) + b"\3", whole))


def test_an_entry_of_4_gb_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "_FULL32", 100)
    with pytest.raises(Unsupported, match="4 GB"):
        write_entries(ENTRIES)


def test_more_entries_than_any_cache_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "MAX_ENTRIES", 2)
    with pytest.raises(Unsupported, match="a zip of 3 entries"):
        read_entries(memoryview(GOOD))


def test_a_directory_of_many_entries_is_bounded_by_its_bytes() -> None:
    claimed: Any = struct.pack("<Q", 2**40) * 2
    with pytest.raises(Damaged, match="not where its end says"):
        read_entries(changed(END64 + 24, claimed))


def with_wide_sizes(extra: bytes) -> memoryview:
    """One entry of 3 bytes, whose sizes stand in the directory's extra field alone."""
    whole = write_entries([("a", b"xyz")])
    start = struct.unpack_from("<I", whole, len(whole) - 6)[0]
    entry = bytearray(whole[start : start + 47])
    entry[20:28] = b"\xff" * 8
    entry[30:32] = struct.pack("<H", len(extra))
    size = len(entry) + len(extra)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, size, start, 0)
    return memoryview(whole[:start] + entry + extra + end)


@pytest.mark.parametrize("before", [b"", b"FB\2\0ZZ"])
def test_sizes_in_the_extra_field_are_read(before: bytes) -> None:
    whole = with_wide_sizes(before + struct.pack("<2H2Q", 1, 16, 3, 3))
    assert {n: bytes(d) for n, d in read_entries(whole).items()} == {"a": b"xyz"}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (b"", "how long it is"),
        (b"\1\0", "how long it is"),
        (struct.pack("<2H2Q", 2, 16, 3, 3), "how long it is"),
        (struct.pack("<2HQ", 1, 8, 3), "how long it is"),
        (struct.pack("<2HQ", 1, 16, 3), "how long it is"),
        (struct.pack("<2H2Q", 1, 16, 3, 2), "compressed"),
        (struct.pack("<2H2Q", 1, 16, 2**63, 2**63), "goes beyond"),
    ],
)
def test_an_extra_field_that_lies_is_refused(extra: bytes, reason: str) -> None:
    with pytest.raises(KvsnapError, match=reason):
        read_entries(with_wide_sizes(extra))
