"""Codes of codec `kvtc` that nobody encoded: valid as entropy code, of numbers that no rows give.

A changed bit of such a code ends where its last state is compared; what is behind that would not be
reached.
"""

from __future__ import annotations

import re
import struct
from random import Random

import numpy as np

from kvsnap.formats.codecs import parts
from kvsnap.formats.codecs.calibration import LayerGroup, find
from kvsnap.formats.errors import Unsupported

_CALIBRATION = re.compile(r"calibration=([0-9a-f]{64});step=([0-9.e-]+)")


def codes(random: Random, fidelity: str, plane: str, tokens: int) -> bytes | None:
    """For a plane of a block with so many coded tokens; None where it is of no calibration at hand."""
    found = _CALIBRATION.search(fidelity)
    if found is None or tokens > 256:
        return None
    try:
        own = find(found[1]).planes.get(plane)
    except Unsupported:
        return None
    if own is None:
        return None
    coded = bytearray()
    for group in own.groups:
        for first in range(0, tokens, parts.TOKENS):
            count = min(parts.TOKENS, tokens - first)
            with np.errstate(all="ignore"):
                part = _part(random, group, float(found[2]), count)
                for code in parts.pack_part(group, float(found[2]), part):
                    coded += struct.pack("<I", len(code)) + code
    return bytes(coded)


def _part(random: Random, group: LayerGroup, step: float, tokens: int) -> parts.Part:
    count, told = parts._counts(group, step)
    source = np.random.default_rng(random.randrange(2**32))
    most = random.choice((1, 30, 5000, 32768))
    weights = source.integers(-12, 25, tokens)
    if random.random() < 0.2:
        weights[:] = random.choice((-13, -128, 25, 100, 127))  # out of range
    return parts.Part(
        weights.astype(np.int8),
        source.integers(-most, most, told).astype(np.int16),
        source.integers(-most, most, (tokens, count)).astype(np.int16),
    )
