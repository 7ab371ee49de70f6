"""llama.cpp's states changed: they are words and rows without any digest, so words are set."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from tests.fuzz import octets

_HEAD = 8


def changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Words behind the head, most of them near the front, where counts stand; one in ten as it comes."""
    if random.random() < 0.1:
        return octets.changed(random, data, others)
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 3))):
        most = random.choice((40, 160, len(found)))
        at = random.randrange(_HEAD, max(_HEAD + 1, min(most, len(found) - 8)))
        octets.put_number(random, found, at - at % 4)
    if random.random() < 0.2:
        return bytes(found[:_HEAD]) + octets.changed(random, bytes(found[_HEAD:]), others)
    return bytes(found)
