"""A portable file's bytes: a plain uncompressed tar (POSIX ustar) of regular files and nothing else.

Each member is a header of 512 bytes and its data, padded to 512; two blocks of zeros end the file.

    0 name 100 | 100 mode 8 | 108 uid 8 | 116 gid 8 | 124 size 12 | 136 mtime 12 | 148 checksum 8
    156 type 1 | 157 link 100 | 257 "ustar\\0" | 263 "00" | 265 owner 32 | 297 group 32
    329 device 16 | 345 prefix 155 | 500 zeros

Numbers are octal text. A name of more than 100 bytes stands in `prefix`/`name`, or, where it does not
split so, in a pax record `path` ahead of the member. Mode 0644, owner and time 0: equal members in
equal order are equal bytes. What a reader finds beyond that is `Damaged`: links, devices, folders,
sparse or oversized members, a missing end, anything behind the end. Names are not judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged

BLOCK = 512
END = bytes(2 * BLOCK)
MAX_SIZE = 8**11 - 1
"""Bytes of a member: what eleven octal digits hold, 8 GiB."""
MAX_MEMBERS = 2**16
"""A million tokens in blocks of 16. Reading so many headers takes half a second, their names 24 MB."""
MAX_PAX = 1024
_REGULAR, _PAX = b"0", b"x"
_MAGIC = b"ustar\x0000"


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive: its name, and where its `size` bytes begin."""

    name: str
    start: int
    size: int


def padding(size: int) -> int:
    """Zeros that fill a member's last block."""
    return -size % BLOCK


def pack_header(name: str, size: int) -> bytes:
    """What stands before the data of a member. `name` is ASCII; `ValueError` for a size that does
    not fit."""
    raw = name.encode("ascii")
    if size > MAX_SIZE:
        raise ValueError(f"a member of {size} bytes")
    split = _split(raw)
    if split is not None:
        return _header(*split, size, _REGULAR)
    record = _record(raw)
    head = _header(b"", b"kvsnap.pax", len(record), _PAX) + record + bytes(padding(len(record)))
    return head + _header(b"", raw[-100:].lstrip(b"/"), size, _REGULAR)


def members(read: Callable[[int, int], bytes], length: int) -> Iterator[Member]:
    """The members of an archive of `length` bytes; `read(start, count)` gives bytes of it.

    Only headers are read. `Damaged` where the file is no archive of this kind, at the latest after
    `MAX_MEMBERS` members.
    """
    at, count, pax = 0, 0, ""
    while True:
        block = _block(read, at, length)
        at += BLOCK
        if not any(block):
            _check_end(read, at, length, pax)
            return
        kind, name, size = _parse(block)
        if size > length - at:
            raise Damaged(f"the archive is cut: {(pax or name)[:80]!r} has {size} bytes")
        if kind == _PAX:
            if pax or size > MAX_PAX:
                raise Damaged("a name in the archive's headers is longer than one of ours")
            pax = _path(read(at, size))
        else:
            count += 1
            if count > MAX_MEMBERS:
                raise Damaged(f"the archive has more than {MAX_MEMBERS} members")
            yield Member(pax or name, at, size)
            pax = ""
        at += size + padding(size)


MOST_PADDING = 2**16
"""Zeros behind the end that other programs may write."""


def _block(read: Callable[[int, int], bytes], at: int, length: int) -> bytes:
    block = read(at, BLOCK) if at + BLOCK <= length else b""
    if len(block) != BLOCK:
        raise Damaged("the archive is cut: it has no end")
    return block


def _check_end(read: Callable[[int, int], bytes], at: int, length: int, pax: str) -> None:
    if pax or any(_block(read, at, length)):
        raise Damaged("the archive ends in the middle of a member")
    padding = length - at - BLOCK  # to a whole record: tar's own are 20 blocks
    if padding > MOST_PADDING or any(read(at + BLOCK, padding)):
        raise Damaged("something stands behind the archive's end")


def _split(name: bytes) -> tuple[bytes, bytes] | None:
    """(prefix, name) as ustar stores them, divided at a slash; None where it cannot."""
    if len(name) <= 100:
        return b"", name
    at = name.find(b"/", len(name) - 101)
    return None if at < 1 or at > 155 or at == len(name) - 1 else (name[:at], name[at + 1 :])


def _record(name: bytes) -> bytes:
    """A pax record counts its own length, the digits of that included."""
    size = len(name) + len(b" path=\n")
    size += len(str(size + len(str(size))))
    return b"%d path=%s\n" % (size, name)


def _header(prefix: bytes, name: bytes, size: int, kind: bytes) -> bytes:
    head = b"".join((
        name.ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size,
        b"%011o\0" % 0, b" " * 8, kind, bytes(100), _MAGIC, bytes(64), b"0000000\0" * 2,
        prefix.ljust(155, b"\0"), bytes(12),
    ))  # fmt: skip
    return b"%s%06o\0 %s" % (head[:148], sum(head), head[156:])


def _parse(block: bytes) -> tuple[bytes, str, int]:
    """(type, name, size) of a header."""
    if block[257:265] != _MAGIC:
        raise Damaged("the file is no archive of kvsnap, or was damaged")
    if _octal(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
        raise Damaged("a header of the archive fails its checksum")
    kind = block[156:157]
    prefix, name = _text(block[345:500]), _text(block[:100])
    if kind not in (_REGULAR, _PAX) or any(block[157:257]):
        raise Damaged(f"a member of the archive is no regular file: {name[:80]!r}")
    return kind, f"{prefix}/{name}" if prefix else name, _octal(block[124:136])


def _octal(field: bytes) -> int:
    digits = field.rstrip(b"\0 ")
    if not digits or digits.strip(b"01234567"):  # also the binary form that large sizes have
        raise Damaged("a number in the archive's headers is none")
    return int(digits, 8)


def _text(field: bytes) -> str:
    text, _, rest = field.partition(b"\0")
    if any(rest) or not text.isascii():
        raise Damaged("a name in the archive's headers is no name of ours")
    return text.decode("ascii")


def _path(data: bytes) -> str:
    """The name in a pax header, which holds that one record and no other (a sparse file's, a size)."""
    _, _, record = data.partition(b" path=")
    name = record[:-1]
    if not name or _record(name) != data or not name.isascii() or b"\0" in name:
        raise Damaged("a pax header of the archive is none of ours")
    return name.decode("ascii")
