"""The zip file that torch.save writes: its entries, read with suspicion, and written as torch does.

    per entry   local header: "PK\\3\\4" | u16 version, flags, method, time, date | u32 crc, size, size
                | u16 name length, extra length | name | extra
                bytes, stored as they are
                data descriptor: "PK\\7\\8" | u32 crc, size, size; the local header then has zeros
    directory   per entry: "PK\\1\\2" | u16 made by, version, flags, method, time, date | u32 crc, size, size
                | u16 name, extra, comment length | u16 disk, attributes | u32 attributes, offset
                | name | extra (zip64: id 1, u64 for each of size, size, offset that is 0xffffffff)
    end         zip64: "PK\\6\\6" | u64 44 | u16 made by, version | u32 disk, disk | u64 entries, entries,
                directory size, offset; then "PK\\6\\7" | u32 disk | u64 offset of that | u32 disks
                "PK\\5\\6" | u16 disk, disk, entries, entries | u32 directory size, offset | u16 comment

torch 2.13: flags 0x808 (descriptor, UTF-8), method 0, time 0, the extra field "FB" pads each entry's bytes
to a multiple of 64, the zip64 end is always there (caffe2/serialize/inline_container.cc over miniz).
All names stand in one folder: data.pkl, data/N, byteorder, version and a few that readers pass over.

torch checks no CRC by default; here each is compared.
"""

from __future__ import annotations

import reprlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged, Unsupported

_LOCAL = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_EXTRA = struct.Struct("<2H")
_LONG = struct.Struct("<Q")
_DESCRIBED, _UTF8 = 0x8, 0x800
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ZIP64, _PADDING = 1, int.from_bytes(b"FB", "little")
ALIGNMENT = 64
MAX_ENTRIES = 65_536
WIDE_FROM = _FULL32
"""Offsets from here on are written in the zip64 field. Tests make it small: a file of 4 GB is none."""


@dataclass(frozen=True)
class _Entry:
    name: str
    crc: int
    size: int
    offset: int
    flags: int


def read_entries(buffer: memoryview) -> dict[str, memoryview]:
    """Entries by name, as views. Raises `Damaged` for whatever a torch.save of one process would not
    give (gaps are allowed, overlaps are not), `Unsupported` for compressed or encrypted entries."""
    start, end, count = _directory(buffer)
    found: dict[str, memoryview] = {}
    free = 0
    for entry in sorted(_central(buffer, start, end, count), key=lambda entry: entry.offset):
        if entry.offset < free:
            raise Damaged(f"entry {_brief(entry.name)} lies over another one")
        begin = _data_start(buffer, entry, start)
        free = begin + entry.size
        if free > start:
            raise Damaged(f"entry {_brief(entry.name)} goes beyond the zip's entries")
        if entry.name in found:
            raise Damaged(f"the zip has two entries {_brief(entry.name)}")
        data = buffer[begin:free]
        if zlib.crc32(data) != entry.crc:
            raise Damaged(
                f"entry {_brief(entry.name)} changed after it was written: its CRC differs",
                "a file saved with torch.serialization.set_crc32_options(False) has none: save it anew",
            )
        found[entry.name] = data
    return found


def _directory(buffer: memoryview) -> tuple[int, int, int]:
    """Begin and end of the directory, and how many entries it has."""
    at = len(buffer) - _END.size
    if at < 0:
        raise Damaged(f"a zip of {len(buffer)} bytes is cut")
    magic, disk, first, here, count, size, offset, comment = _END.unpack_from(buffer, at)
    if magic != b"PK\5\6" or comment:
        raise Damaged("the file does not end as a zip does: it is cut, or has something behind it")
    if disk or first or here != count:
        raise Damaged("the zip says that it is one of several")
    end = at
    locator = at - _LOCATOR.size
    if locator >= _END64.size and bytes(buffer[locator : locator + 4]) == b"PK\6\7":
        _, disk, end, disks = _LOCATOR.unpack_from(buffer, locator)
        if disk or disks != 1 or end + _END64.size != locator:
            raise Damaged("the zip's two ends are not of one file")
        magic, length, _, _, disk, first, here, count, size, offset = _END64.unpack_from(
            buffer, end
        )
        if magic != b"PK\6\6" or length != _END64.size - 12 or disk or first or here != count:
            raise Damaged("the zip's zip64 end is not one")
    if offset + size != end or count * _CENTRAL.size > size:
        raise Damaged("the zip's directory is not where its end says")
    if count > MAX_ENTRIES:
        raise Unsupported(f"a zip of {count} entries: a cache has two for each layer")
    return offset, end, count


def _central(buffer: memoryview, start: int, end: int, count: int) -> Iterator[_Entry]:
    at = start
    for _ in range(count):
        if at + _CENTRAL.size > end:
            raise Damaged("the zip's directory has fewer entries than its end says")
        magic, _, _, flags, method, _, _, crc, packed, size, *rest = _CENTRAL.unpack_from(
            buffer, at
        )
        name_size, extra_size, comment, disk, _, _, offset = rest
        at += _CENTRAL.size
        stop = at + name_size + extra_size
        if magic != b"PK\1\2" or comment or disk or stop > end:
            raise Damaged("the zip's directory is damaged")
        name = _name(bytes(buffer[at : at + name_size]))
        if method or packed != size:
            raise Unsupported(f"entry {_brief(name)} is compressed: torch.save does not do that")
        if flags & ~(_DESCRIBED | _UTF8):
            raise Unsupported(f"entry {_brief(name)} has flags {flags:#x}: torch.save has others")
        wide = _zip64(bytes(buffer[at + name_size : stop]), (size, packed, offset))
        if wide[0] != wide[1]:
            raise Unsupported(f"entry {_brief(name)} is compressed: torch.save does not do that")
        yield _Entry(name, crc, wide[0], wide[2], flags)
        at = stop
    if at != end:
        raise Damaged("the zip's directory has more entries than its end says")


def _zip64(extra: bytes, narrow: tuple[int, int, int]) -> list[int]:
    """Size, size and offset, where they are too wide for the directory."""
    fields = [number == _FULL32 for number in narrow]
    if not any(fields):
        return list(narrow)
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP64:
            if length != 8 * sum(fields) or at + length > len(extra):
                break
            wide = iter(struct.unpack_from(f"<{sum(fields)}Q", extra, at))
            return [
                next(wide) if is_wide else number
                for is_wide, number in zip(fields, narrow, strict=True)
            ]
        at += length
    raise Damaged("an entry of the zip does not say how long it is")


def _name(raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Damaged("the zip has an entry whose name is no text") from error
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Damaged(f"the zip has an entry named {_brief(name)}")
    return name


def _data_start(buffer: memoryview, entry: _Entry, limit: int) -> int:
    """Where an entry's bytes begin; its local header must be of the directory's mind."""
    if entry.offset + _LOCAL.size > limit:
        raise Damaged(f"entry {_brief(entry.name)} goes beyond the zip's entries")
    magic, _, flags, method, _, _, crc, packed, size, name_size, extra_size = _LOCAL.unpack_from(
        buffer, entry.offset
    )
    at = entry.offset + _LOCAL.size
    name = bytes(buffer[at : at + name_size])
    if magic != b"PK\3\4" or flags != entry.flags or method or name != entry.name.encode("utf-8"):
        raise Damaged(f"entry {_brief(entry.name)} is not what the zip's directory says")
    told = (crc, packed, size)
    deferred = flags & _DESCRIBED and set(told) <= {0, _FULL32}
    wide = told == (entry.crc, _FULL32, _FULL32)
    if told != (entry.crc, entry.size, entry.size) and not deferred and not wide:
        raise Damaged(f"entry {_brief(entry.name)} is not what the zip's directory says")
    begin: int = at + name_size + extra_size
    return begin


def write_entries(entries: Sequence[tuple[str, bytes | memoryview]]) -> bytes:
    """One zip of these, in their order: the bytes that torch writes for them."""
    parts: list[bytes | memoryview] = []
    directory: list[bytes] = []
    at = 0
    for name, data in entries:
        raw, size, crc = name.encode("utf-8"), memoryview(data).nbytes, zlib.crc32(data)
        if size >= _FULL32:
            raise Unsupported(f"{size} bytes of one layer are more than a zip's entry of 4 GB")
        filled = at + _LOCAL.size + len(raw) + _EXTRA.size
        padding = -filled % ALIGNMENT
        extra = _EXTRA.pack(_PADDING, padding) + b"Z" * padding
        flags = _DESCRIBED | _UTF8
        parts += [
            _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra)),
            raw,
            extra,
            data,
            _DESCRIPTOR.pack(b"PK\7\x08", crc, size, size),
        ]
        wide = at >= WIDE_FROM
        extra = _EXTRA.pack(_ZIP64, 8) + _LONG.pack(at) if wide else b""
        lengths = (len(raw), len(extra), 0, 0, 0, 0)
        offset = _FULL32 if wide else at
        numbers = (0, 0, flags, 0, 0, 0, crc, size, size)
        directory += [_CENTRAL.pack(b"PK\1\2", *numbers, *lengths, offset), raw, extra]
        at = filled + padding + size + _DESCRIPTOR.size
    listed = b"".join(directory)
    count = len(entries)
    parts += [
        listed,
        _END64.pack(b"PK\6\6", _END64.size - 12, *_VERSIONS, 0, 0, count, count, len(listed), at),
        _LOCATOR.pack(b"PK\6\7", 0, at + len(listed), 1),
        _END.pack(b"PK\5\6", 0, 0, *(min(count, _FULL16),) * 2, len(listed), min(at, _FULL32), 0),
    ]
    return b"".join(parts)


_VERSIONS = (0x031E, 0x002D)
"""miniz's own: made by, needed."""


def _brief(name: str) -> str:
    return reprlib.repr(name)
