"""How fast a codec is: bytes of rows a second, on one core and on all, beside plain copies.

Figures of one run compare with each other, not with another run's: the machine is never quiet.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import zstandard

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.rowset import decode_rows, encode_rows

ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """GB of rows a second: of processor time, that of a library's threads included, and of wall
    time with all cores."""

    encode: float
    decode: float
    decode_all_cores: float


def measure_speed(codec: Codec, layout: Layout, rows: Rows, block_size: int) -> Speed:
    """Over all whole blocks of `rows`, the best of several rounds; files and digests not counted."""
    tokens = next(iter(rows.values())).shape[1]
    starts = range(0, tokens - block_size + 1, block_size)
    parts = [
        {n: np.ascontiguousarray(a[:, s : s + block_size]) for n, a in rows.items()} for s in starts
    ]
    out = layout.empty(tokens)
    views = [{n: a[:, s : s + block_size] for n, a in out.items()} for s in starts]
    size = sum(a.nbytes for part in parts for a in part.values())
    coded: list[dict[str, Tensor]] = []

    def encode() -> None:
        coded[:] = [
            dict(encode_rows(codec, layout, part, start))
            for start, part in zip(starts, parts, strict=True)
        ]

    def decode_one(number: int) -> None:
        decode_rows(codec, layout, coded[number], views[number], starts[number])

    def decode() -> None:
        for number in range(len(parts)):
            decode_one(number)

    encoding, decoding = _best(encode, time.process_time), _best(decode, time.process_time)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        both = _best(lambda: list(pool.map(decode_one, range(len(parts)))), time.perf_counter)
    gigabytes = size / 1e9
    return Speed(
        encode=gigabytes / encoding, decode=gigabytes / decoding, decode_all_cores=gigabytes / both
    )


def measure_copy(layout: Layout, rows: Rows, block_size: int) -> dict[str, float]:
    """What a decoder is up against, in GB/s of one core: a copy of the rows, block by block, and
    zstd-1 over all their bytes (ratio and decoding)."""
    tokens = next(iter(rows.values())).shape[1] // block_size * block_size
    cuts = [slice(s, s + block_size) for s in range(0, tokens, block_size)]
    arrays = [np.ascontiguousarray(a[:, cut]) for cut in cuts for a in rows.values()]
    size = sum(a.nbytes for a in arrays)
    targets = [np.empty_like(a) for a in arrays]

    def copy() -> None:
        for target, array in zip(targets, arrays, strict=True):
            target[...] = array

    frames = [zstandard.ZstdCompressor(level=1).compress(a.tobytes()) for a in arrays]

    def plain() -> None:
        for frame, target in zip(frames, targets, strict=True):
            with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
                reader.readinto(target.reshape(-1).view(np.uint8))

    return {
        "copy": size / 1e9 / _best(copy, time.process_time),
        "plain_zstd": size / 1e9 / _best(plain, time.process_time),
        "plain_zstd_ratio": size / sum(map(len, frames)),
    }


def _best(work: Callable[[], object], clock: Callable[[], float]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = clock()
        work()
        best = min(best, clock() - started)
    return max(best, 1e-9)
