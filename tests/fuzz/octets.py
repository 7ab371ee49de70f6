"""Bytes changed without a look at what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

NUMBERS = (0, 1, 2, 3, 4, 30, 255, 2**15, 2**16, 2**24 + 8, 2**31 - 1, 2**31, 2**32 - 1)
_LONG = (2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def changed(random: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to four of: a bit or byte set, a run overwritten, cut, inserted, repeated or dropped, a word
    set to a number of interest, the rest of another input put behind."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        if not found:
            return random.randbytes(random.randrange(40))
        _change(random, found, others)
    return bytes(found)


def _change(random: Random, data: bytearray, others: Sequence[bytes]) -> None:
    at = random.randrange(len(data))
    end = min(len(data), at + random.choice((1, 2, 8, 64, 600)))
    kind = random.randrange(10)
    if kind <= 1:
        data[at] ^= 1 << random.randrange(8)
    elif kind == 2:
        data[at] = random.choice((0, 1, 127, 128, 255, 0x22, 0x7B))
    elif kind == 3:
        data[at:end] = random.randbytes(end - at)
    elif kind == 4:
        data[at:end] = bytes([random.choice((0, 255))]) * (end - at)
    elif kind == 5:
        del data[at : end if random.random() < 0.5 else None]
    elif kind == 6:
        data[at:at] = random.choice((b"\0" * 8, random.randbytes(3), bytes(data[at:end])))
    elif kind == 7:
        put_number(random, data, at - at % 4)
    elif kind == 8 and others:
        other = random.choice(others)
        data[at:] = other[min(at, len(other)) :]
    else:
        data += random.choice((b"\0", b" " * 64, random.randbytes(9), bytes(data[at:end])))


def put_number(random: Random, data: bytearray, at: int) -> None:
    """Overwrite 4 or 8 bytes by a little-endian number."""
    if random.random() < 0.25:
        number, size = random.choice(_LONG), 8
    else:
        number, size = random.choice(NUMBERS), 4
    data[at : at + size] = number.to_bytes(size, "little")
