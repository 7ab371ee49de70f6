"""Portable files changed: members moved, headers with other fields and a checksum that fits."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz import octets

_BLOCK = 512
_FIELDS = (
    (0, 100), (100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8),
    (265, 32), (297, 32), (329, 16), (345, 155), (500, 12),
)  # fmt: skip
_VALUES = (
    b"", b"0", b"7", b"00000000000", b"77777777777", b"\x80" + b"\xff" * 11, b"-1", b"8", b" 12",
    b"1 2", b"\xff" * 12, b"../../../etc/passwd", b"/abs", b"a" * 155, b"blocks/../x", b"\xc3\xa9",
    b"a\0b", b"x", b"5", b"1", b"2", b"L", b"g", b"ustar  \0", b"ustar\x0000", b"kvsnap.pax",
)  # fmt: skip
_RECORDS = (
    b"9 path=a\n", b"10 path=a\n", b"11 path=ab\n", b"30 path=" + b"a" * 20 + b"\n", b"9 size=1\n",
    b"99999999999 path=x\n", b"9 path=\0\n", b" path=", b"\xff 9 path=a\n", b"",
)  # fmt: skip


def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    if random.random() < 0.2:
        return octets.changed(random, data, others)
    members, end = take_apart(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        if members:
            _change(random, members)
    if random.random() < 0.1:
        end = random.choice((b"", end[:512], end * 2, end + b"\0" * 2**16, end + b"x", b"x" + end))
    return b"".join(head + body for head, body in members) + end


def take_apart(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """(header, padded data) of each member of a valid archive, and the rest."""
    at, members = 0, list[tuple[bytes, bytes]]()
    while any(data[at : at + _BLOCK]):
        head = data[at : at + _BLOCK]
        size = int(head[124:135], 8)
        end = at + _BLOCK + size + -size % _BLOCK
        members.append((head, data[at + _BLOCK : end]))
        at = end
    return members, data[at:]


def _change(random: Random, members: list[tuple[bytes, bytes]]) -> None:
    at = random.randrange(len(members))
    head, body = members[at]
    kind = random.randrange(8)
    if kind == 0:
        members.insert(random.randrange(len(members) + 1), members[at])
    elif kind == 1:
        del members[at]
    elif kind == 2:
        random.shuffle(members)
    elif kind == 3:
        record = random.choice(_RECORDS)
        size = random.choice((len(record), len(record), 0, 1024, 1025, 8**11 - 1))
        made = _with(_with(head, 156, 1, b"x"), 124, 12, b"%011o\0" % size)
        members.insert(at, (made, record + bytes(-len(record) % _BLOCK)))
    elif kind == 4:
        size = random.choice((0, 1, 511, 512, 513, len(body), 10**6))
        members[at] = (_with(head, 124, 12, b"%011o\0" % size), body)
    else:
        start, width = random.choice(_FIELDS)
        value = random.choice(_VALUES)[:width]
        if random.random() < 0.3:
            value = random.randbytes(width)
        members[at] = (_with(head, start, width, value), body)


def _with(head: bytes, start: int, width: int, value: bytes) -> bytes:
    """The header with another field, and its checksum."""
    made = head[:start] + value.ljust(width, b"\0") + head[start + width :]
    total = sum(made) - sum(made[148:156]) + 8 * ord(" ")
    return made[:148] + b"%06o\0 " % total + made[156:]
