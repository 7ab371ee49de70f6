"""Files that claim to be archives of kvsnap: what is never accepted, and what that costs."""

from __future__ import annotations

import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from kvsnap.formats.archive import (
    BLOCK,
    END,
    MAX_MEMBERS,
    pack_header,
    padding,
)
from kvsnap.formats.errors import Damaged
from kvsnap.kvstore.remotes.archive import Archive

MEGABYTE = 1 << 20


def packed(*files: tuple[str, bytes]) -> bytes:
    return b"".join(pack_header(k, len(d)) + d + bytes(padding(len(d))) for k, d in files)


def write(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(packed(*files.items()) + END)
    return path


def fixed(header: bytearray) -> bytes:
    """A header with its checksum set right again."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def with_field(start: int, data: bytes, name: str = "a", size: int = 0) -> bytes:
    header = bytearray(pack_header(name, size))
    header[start : start + len(data)] = data
    return fixed(header)


@pytest.mark.parametrize("size", range(0, 4 * BLOCK, 97))
def test_every_cut_is_noticed_on_open(tmp_path, size):
    path = write(tmp_path / "a", {"a": b"x" * 600, "b": b"", "c": b"y"})
    whole = path.read_bytes()
    for at in (size, len(whole) - 1 - size):
        path.write_bytes(whole[:at])
        with pytest.raises(Damaged):
            Archive.open(path)


def test_a_cut_while_it_is_read_is_noticed(tmp_path):
    path = write(tmp_path / "a", {"a": bytes(5000)})
    with Archive.open(path) as archive:
        os.truncate(path, 3000)
        with pytest.raises(Damaged, match="was cut while"):
            archive.get("a", 5000)


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_of_a_header_passes(tmp_path, bit):
    path = write(tmp_path / "a", {"a": b"x", "/".join(["k" * 102] * 5)[:512]: b"y"})
    whole = path.read_bytes()
    headers = {at for at in range(0, len(whole), BLOCK) if whole[at + 257 : at + 262] == b"ustar"}
    assert len(headers) == 3
    for at in (start + byte for start in headers for byte in range(0, BLOCK, 3)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(Damaged):
            Archive.open(path)


def as_tar(tar_format: int, *files: tarfile.TarInfo) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for info in files:
            tar.addfile(info, io.BytesIO(bytes(info.size)))
    return out.getvalue()


def info(name: str = "a", **fields: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(found, field, value)
    return found


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "zeros": bytes(300 * BLOCK),
    "noise": os.urandom(10 * BLOCK),
    "gzip": b"\x1f\x8b" + os.urandom(3 * BLOCK),
    "no end": packed(("a", b"x")),
    "half an end": packed(("a", b"x")) + bytes(BLOCK),
    "more behind the end": packed(("a", b"x")) + END + packed(("b", b"y")) + END,
    "many zeros behind the end": packed(("a", b"x")) + END + bytes(300 * BLOCK),
    "a byte behind the end": packed(("a", b"x")) + END + bytes(BLOCK - 1) + b"x",
    "twice the same": packed(("a", b"x"), ("a", b"x")) + END,
    "up": packed(("../a", b"x")) + END,
    "up in the middle": packed(("a/../../b", b"x")) + END,
    "up in a prefix": with_field(345, b"../..") + END,
    "absolute": packed(("/etc/passwd", b"x")) + END,
    "absolute prefix": with_field(345, b"/etc") + END,
    "upper case": packed(("A", b"x")) + END,
    "empty name": with_field(0, b"\0") + END,
    "text behind a NUL": with_field(0, b"a\0b") + END,
    "not ASCII": with_field(0, "ä".encode()) + END,
    "six folders": packed(("a/b/c/d/e/f", b"x")) + END,
    "longer than a key": packed(("k/" * 4 + "k" * 800, b"x")) + END,
    "5,000 characters": packed(("k" * 5000, b"x")) + END,
    **{f"type {kind!r}": with_field(156, kind) + END
       for kind in (b"\0", b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"D", b"g", b"K", b"L", b"S",
                    b"V", b"M", b"X", b"A")},
    "a target of a link": with_field(157, b"../x") + END,
    "symbolic link": as_tar(tarfile.USTAR_FORMAT, info(type=tarfile.SYMTYPE, linkname="/etc")),
    "folder": as_tar(tarfile.USTAR_FORMAT, info(type=tarfile.DIRTYPE)),
    "GNU's long name": as_tar(tarfile.GNU_FORMAT, info("n" * 300)),
    "a pax size": as_tar(tarfile.PAX_FORMAT, info(pax_headers={"size": "99999999999"})),
    "a pax sparse map": as_tar(tarfile.PAX_FORMAT, info(pax_headers={"GNU.sparse.size": "9"})),
    "a global header": as_tar(tarfile.PAX_FORMAT, info()).join([
        tarfile.TarInfo.create_pax_global_header({"path": "../x"}), b""]),
    "a huge member": with_field(124, b"77777777777\0") + END,
    "a size of 2^64": with_field(124, b"\x80" + b"\xff" * 11) + END,
    "a negative size": with_field(124, b"-0000000001\0") + END,
    "no size": with_field(124, bytes(12)) + END,
    "no octal size": with_field(124, b"00000000009\0") + END,
    "no checksum": with_field(0, b"a")[:148] + bytes(8) + with_field(0, b"a")[156:] + END,
    "another magic": with_field(257, b"ustar  \0") + END,
    "a pax header at the end": with_field(156, b"x") + END,
    "two pax headers": pack_header("k" * 200, 0)[: 2 * BLOCK] * 2 + with_field(0, b"a") + END,
    "a pax length that lies": pack_header("k" * 200, 0).replace(b"210 path", b"990 path") + END,
    "a pax name with a NUL": pack_header("k" * 200, 0).replace(b"=kkk", b"=k\0k") + END,
    "too many members": b"".join(
        pack_header(f"b/{number}", 0) for number in range(MAX_MEMBERS + 1)) + END,
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_within_64_mb(tmp_path, name):
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE[name])
    tracemalloc.start()
    try:
        if name == "zeros":
            with pytest.raises(Damaged, match="behind the archive's end"):
                Archive.open(path)
        else:
            with pytest.raises(Damaged) as raised:
                Archive.open(path)
            assert len(raised.value.what) < 300
            assert raised.value.what.isprintable()
        assert tracemalloc.get_traced_memory()[1] < 64 * MEGABYTE
    finally:
        tracemalloc.stop()


def test_a_member_that_is_longer_than_the_file_is_named(tmp_path):
    path = tmp_path / "hostile"
    path.write_bytes(HOSTILE["a huge member"])
    with pytest.raises(Damaged, match="is cut: 'a' has 8589934591 bytes"):
        Archive.open(path)


def test_a_pax_header_of_gigabytes_is_not_read(tmp_path):
    path = tmp_path / "hostile"
    path.write_bytes(with_field(156, b"x", size=1 << 32))
    os.truncate(path, 1 << 33)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="longer than one of ours"):
            Archive.open(path)
        assert tracemalloc.get_traced_memory()[1] < MEGABYTE
    finally:
        tracemalloc.stop()


def test_a_sparse_file_of_terabytes_is_refused_at_once(tmp_path):
    path = tmp_path / "hostile"
    path.write_bytes(packed(("a", b"x")))
    os.truncate(path, 1 << 42)
    with pytest.raises(Damaged, match="behind the archive's end"):
        Archive.open(path)


def test_the_most_members_open(tmp_path):
    path = tmp_path / "full"
    path.write_bytes(b"".join(pack_header(f"b/{n}", 0) for n in range(MAX_MEMBERS)) + END)
    tracemalloc.start()
    try:
        with Archive.open(path) as archive:
            assert sum(1 for _ in archive.list("b/")) == MAX_MEMBERS
        assert tracemalloc.get_traced_memory()[1] < 64 * MEGABYTE
    finally:
        tracemalloc.stop()


def test_zeros_to_a_whole_record_of_tar_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "padded.kvsnap"
    path.write_bytes(packed(("a", b"x")) + END + bytes(17 * BLOCK))
    with Archive.open(path) as archive:
        assert archive.get("a", 10).data == b"x"
