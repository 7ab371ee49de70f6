"""`zstd`: byte planes of elements, the high one compressed by zstd level 1; bit exact.

Elements are split by byte: `.b0` holds every element's lowest byte, `.b1` the next, and so on. The
high byte (sign, exponent) compresses, the lower ones are noise: on the bundled model's f16 rows
zstd-1 on the high plane alone gave 1.16x, levels 3 and 9 no more, 9 at half of the speed. Other
kinds of rows are one plane `.b0`. A plane that does not shrink is stored as it is: a stored length
equal to the decoded one means raw, a shorter one means a zstd frame.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from kvsnap.formats.codecs import compiled
from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.codecs.stored import Scratch, inflate
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array, Plane

LEVEL = 1
_SCRATCH = Scratch()


@dataclass(frozen=True)
class Zstd(Codec):
    id = "zstd"

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        count = _planes(at.plane)
        stored: dict[str, Tensor] = {}
        for number in range(count):
            data: Any = rows if count == 1 else (rows >> (8 * number)).astype(np.uint8)
            # The low bytes of a float do not compress (f16: 7.99 bits of 8). Rows of ggml's
            # quantized types are one plane, and tried.
            if number == count - 1 or number > 1:
                frame = zstandard.ZstdCompressor(level=LEVEL).compress(data)
                data = frame if len(frame) < rows.nbytes // count else data
            stored[f".b{number}"] = Tensor("U8", (memoryview(data).nbytes,), data)
        return stored

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        plane, count = at.plane, _planes(at.plane)
        if sorted(stored) != [f".b{number}" for number in range(count)]:
            raise Damaged(
                f"codec zstd stores {count} byte planes, not {reprlib.repr(sorted(stored))}"
            )
        size = math.prod(out.shape) * out.itemsize // count
        scratch = _SCRATCH.take(size * (count + plane.itemsize))
        planes = [
            _plane_bytes(stored[f".b{n}"], scratch[n * size : (n + 1) * size]) for n in range(count)
        ]
        if count == 1:
            out[...] = planes[0].view(plane.memory_dtype).reshape(out.shape)
            return
        # Shift and or in the element's own type: 3x faster than storing every second byte.
        joined = scratch[count * size :].view(plane.memory_dtype)
        join = compiled.joiner()
        if join is not None and count == 2:
            join(planes[0], planes[1], joined)
        else:
            joined[...] = planes[-1]
            for data in reversed(planes[:-1]):
                joined <<= 8
                joined |= data
        out[...] = joined.reshape(out.shape)


def _planes(plane: Plane) -> int:
    return plane.itemsize if plane.kind == "elements" else 1


def _plane_bytes(tensor: Tensor, scratch: Array) -> Array:
    """The bytes of one plane: the stored ones, or decompressed into `scratch`."""
    stored, size = memoryview(tensor.data), len(scratch)
    if (tensor.dtype, tensor.shape) != ("U8", (stored.nbytes,)) or stored.nbytes > size:
        raise Damaged(f"a byte plane of {stored.nbytes} bytes where at most {size} belong")
    if stored.nbytes == size:
        return np.frombuffer(stored, np.uint8)
    inflate(stored, scratch, "a compressed plane")
    return scratch
