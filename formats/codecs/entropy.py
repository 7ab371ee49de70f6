"""Entropy coding of small integers whose spread is known: interleaved rANS with fixed tables.

A value belongs to a class, which says how widely such values are spread; encoder and decoder know
it. Class c is a logistic distribution, rounded to integers, whose mean magnitude is 2^((c - 16) / 4).
It fits what PCA leaves of keys and values better than Laplace's, by 1.2 % of the bytes. Classes
above `_WIDEST` leave their low bits out of the code and store them as they are.

Many coders (lanes) work side by side, one value of each a step, so that numpy does the loop (J. Duda,
arXiv 1311.2540; F. Giesen, arXiv 1402.3392). States are 32 bits, words 16. A lane starts from 2^16
plus a word of what is stored as it is, which the decoder's last state gives back: else 256 lanes cost
512 bytes, 1 % of a plane. Tables come from IEEE additions, products, quotients and square roots in a
fixed order, so they are the same on every machine.

    u32 states of the lanes | u16 words, in the order the decoder takes them
    | u16 words stored as they are, as far as no state holds them:
    low bits | values that their class has no symbol for | number of extra words, extra words
"""

from __future__ import annotations

import functools
import math

import numpy as np

from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array

CLASSES = 73
"""Mean magnitudes 2^-4 to 2^14: of the values that int16 holds, all."""
MIDDLE = 16
"""The class of mean magnitude 1."""
PER_OCTAVE = 4
_WIDEST = 28
"""Mean magnitude 8. Its values beyond 127 are none: the tail is e^-21."""
_BITS = 12
_TOTAL = 1 << _BITS
_LARGEST, _OTHER = 127, 255
"""Symbols 0..254 are values -127..127; 255 says that the value is stored beside the code."""
_LANES = 256
_STEPS = 128
"""Fewer lanes where that many steps each would not be had: a lane costs its 4 bytes."""
_LOW = 1 << 16


def encode(values: Array, classes: Array, extra: bytes = b"") -> bytes:
    """Code int16 values of the classes given (uint8, same length, below `CLASSES`). `extra`, of even
    length up to 128 KiB, is stored beside them, much of it for nothing."""
    shifts = _shifts()[classes]
    high, raw = _split(values.astype(np.int32), shifts)
    frequency, start, _ = _tables()
    table = _narrowed()[classes]
    symbols = high + _LARGEST
    np.putmask(symbols, np.abs(high) > _LARGEST, _OTHER)
    np.putmask(symbols, frequency[table, symbols] == 0, _OTHER)
    others = high[symbols == _OTHER].astype("<i2").view("<u2")
    parts = [raw, others]
    if extra:
        parts += [np.array([len(extra) // 2], "<u2"), np.frombuffer(extra, "<u2")]
    raw = np.concatenate(parts)
    lanes = _lanes(len(values))
    padding = -len(values) % lanes
    table = np.pad(table, (0, padding)).reshape(-1, lanes)
    symbols = np.pad(symbols, (0, padding), constant_values=_LARGEST).reshape(-1, lanes)
    states = np.full(lanes, _LOW, np.uint32)
    states[: len(raw)] += raw[:lanes]
    words = _push(states, frequency[table, symbols], start[table, symbols])
    return states.astype("<u4").tobytes() + words.tobytes() + raw[lanes:].tobytes()


def decode(data: memoryview, classes: Array) -> tuple[Array, bytes]:
    """The int16 values and the extra bytes that `encode` was given; `Damaged` unless `data` is
    exactly theirs."""
    lanes = _lanes(len(classes))
    if len(data) < 4 * lanes or len(data) % 2:
        raise Damaged(f"codes of {len(data)} bytes are cut")
    table = np.pad(_narrowed()[classes], (0, -len(classes) % lanes)).reshape(-1, lanes)
    states = np.frombuffer(data, "<u4", lanes).astype(np.uint32)
    words = np.frombuffer(data, "<u2", offset=4 * lanes)
    symbols, used = _pull(states, words, table)
    symbols = symbols[: len(classes)]
    if (states >> 16 != 1).any():
        raise Damaged("codes do not end where they began")
    raw = np.concatenate([states.astype("<u2"), words[used:]])
    shifts = _shifts()[classes]
    others = np.flatnonzero(symbols == _OTHER)
    low = -(-int(shifts.sum(dtype=np.int64)) // 16)
    first = low + len(others)
    length = int(raw[first]) if first < len(raw) else 0
    end = first + (length + 1 if length else 0)
    if len(raw) != max(end, lanes) or raw[end:].any():
        raise Damaged("codes are longer or shorter than their values")
    high = symbols.astype(np.int32) - _LARGEST
    high[others] = raw[low:first].view("<i2")
    return _join(high, shifts, raw[:low]), raw[first + 1 : end].tobytes()


def _lanes(count: int) -> int:
    return max(1, min(_LANES, count // _STEPS))


def _push(states: Array, frequency: Array, start: Array) -> Array:
    """Encode, last step first. Changes `states`; returns the words in the decoder's order."""
    limit = frequency << np.uint32(32 - _BITS)
    words = []
    for step in range(len(frequency) - 1, -1, -1):
        (full,) = (states >= limit[step]).nonzero()
        moved = states[full]
        words.append(moved.astype("<u2"))
        states[full] = moved >> np.uint32(16)
        quotient = states // frequency[step]
        states += quotient * (np.uint32(_TOTAL) - frequency[step]) + start[step]
    words.reverse()
    return np.concatenate(words) if words else np.empty(0, "<u2")


def _pull(states: Array, words: Array, table: Array) -> tuple[Array, int]:
    """Decode all steps. Changes `states`; returns symbols (uint8, flat) and how many words."""
    _, _, slots = _tables()
    slots = slots.reshape(-1)
    entries = np.empty(table.shape, np.uint32)
    index = table.astype(np.uint32) << np.uint32(_BITS)
    mask, bits, eight, twenty = (np.uint32(n) for n in (_TOTAL - 1, _BITS, 8, 20))
    slot, low = np.empty_like(states), np.uint32(_LOW)
    used, count = 0, len(words)
    for at, entry in zip(index, entries, strict=True):
        np.bitwise_and(states, mask, out=slot)
        np.bitwise_or(slot, at, out=slot)
        slots.take(slot, out=entry, mode="wrap")  # "raise" would copy; none is out of range
        np.right_shift(states, bits, out=states)
        np.multiply(states, entry >> twenty, out=states)
        np.right_shift(entry, eight, out=slot)
        np.bitwise_and(slot, mask, out=slot)
        np.add(states, slot, out=states)
        (empty,) = (states < low).nonzero()
        end = used + len(empty)
        if end > count:
            raise Damaged("codes end before their values do")
        states[empty] = (states[empty] << np.uint32(16)) | words[used:end]
        used = end
    return entries.astype(np.uint8).reshape(-1), used


def _split(values: Array, shifts: Array) -> tuple[Array, Array]:
    """High parts, and the low bits packed into words, the fewest bits first."""
    half = (1 << shifts) >> 1
    high = (values + half) >> shifts
    low = values + half - (high << shifts)
    packed = []
    for shift in range(1, int(shifts.max(initial=0)) + 1):
        own = low[shifts == shift].astype(np.uint16)
        packed.append((own[:, None] >> np.arange(shift, dtype=np.uint16)) & np.uint16(1))
    bits = np.concatenate([part.reshape(-1) for part in packed]) if packed else np.empty(0)
    octets = np.packbits(bits.astype(np.uint8))
    return high, np.pad(octets, (0, len(octets) % 2)).view("<u2")


def _join(high: Array, shifts: Array, words: Array) -> Array:
    """Inverse of `_split`."""
    bits = np.unpackbits(words.view(np.uint8))
    values = (high << shifts) - ((1 << shifts) >> 1)
    used = 0
    for shift in range(1, int(shifts.max(initial=0)) + 1):
        own = np.flatnonzero(shifts == shift)
        part = bits[used : used + shift * len(own)].reshape(-1, shift)
        values[own] += part @ (1 << np.arange(shift))
        used += shift * len(own)
    return values.astype(np.int16)  # wraps where the bytes are hostile: any value will do


def mean_magnitude(number: int) -> float:
    """2^((number - 16) / 4), the same bits everywhere."""
    octaves, quarters = divmod(number - MIDDLE, PER_OCTAVE)
    mean = math.ldexp(1.0, octaves)
    for _ in range(quarters):
        mean *= math.sqrt(math.sqrt(2.0))
    return mean


@functools.cache
def _shifts() -> Array:
    """Class → how many low bits are left out."""
    return np.maximum(0, -(-(np.arange(CLASSES) - _WIDEST) // PER_OCTAVE)).astype(np.int32)


@functools.cache
def _narrowed() -> Array:
    """Class → the class that its high part is coded with."""
    narrowed: Array = np.arange(CLASSES) - PER_OCTAVE * _shifts()
    return narrowed.astype(np.int64)


@functools.cache
def _tables() -> tuple[Array, Array, Array]:
    """Frequencies and starts [class, symbol] of 4096, and [class, slot] of what decoding needs:
    frequency (12 bits), slot - start (12), symbol (8)."""
    count = _WIDEST + 1
    frequency = np.zeros((count, 256), np.uint32)
    for number in range(count):
        tail = _tails(mean_magnitude(number))
        for value in range(1, _LARGEST + 1):
            share = int((tail[value - 1] - tail[value]) * _TOTAL + 0.5)
            if share == 0 and value > 1:
                break
            frequency[number, [_LARGEST - value, _LARGEST + value]] = max(1, share)
        frequency[number, _OTHER] = 1
        frequency[number, _LARGEST] = _TOTAL - frequency[number].sum()
    start = (np.cumsum(frequency, axis=1) - frequency).astype(np.uint32)
    slots = np.empty((count, _TOTAL), np.uint32)
    for number in range(count):
        symbols = np.repeat(np.arange(256), frequency[number])
        bias = np.arange(_TOTAL) - start[number, symbols]
        slots[number] = (frequency[number, symbols] << 20) | (bias << 8) | symbols
    return frequency, start, slots


def _tails(mean: float) -> list[float]:
    """P(x > n + 1/2), n from 0, of the logistic distribution whose scale is 3/4 of `mean`."""
    ratio = _exp_of_minus(0.5 / (0.75 * mean))
    odds, tails = ratio, []
    for _ in range(_LARGEST + 1):
        tails.append(odds / (1.0 + odds))
        odds *= ratio * ratio
    return tails


def _exp_of_minus(x: float) -> float:
    """e^-x for x of 0..16, to 1e-9: libraries differ in the last bit of theirs."""
    y = x / 4096.0
    power = 1.0 / (1.0 + y * (1.0 + y * (0.5 + y / 6.0)))
    for _ in range(12):
        power *= power
    return power
