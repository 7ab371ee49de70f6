"""Reading stored tensors with suspicion, and working memory: what codecs share.

A shape, a type or a size that the plane and the number of tokens do not imply is `Damaged`, found
before memory is taken for it.
"""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Collection, Mapping

import numpy as np
import zstandard

from kvsnap.formats.codecs.base import Stretch
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import ELEMENT_BYTES, Array


def check_elements(codec_id: str, at: Stretch) -> None:
    """`Unsupported` unless the plane holds floating-point elements, which can be rounded."""
    plane = at.plane
    if plane.kind != "elements" or plane.dtype == "U8":
        raise Unsupported(
            f"codec {codec_id} cannot take plane {plane.name}: {plane.kind} of type {plane.dtype}",
            "use codec zstd or raw, or an engine that keeps KV as F32, F16 or BF16",
        )


def check_names(codec_id: str, stored: Mapping[str, Tensor], *known: Collection[str]) -> None:
    """`Damaged` unless the suffixes are exactly one of the known sets."""
    if not any(stored.keys() == set(names) for names in known):
        raise Damaged(
            f"codec {codec_id} stores {' or '.join(str(sorted(names)) for names in known)},"
            f" not {reprlib.repr(sorted(stored))}"
        )


def read(stored: Mapping[str, Tensor], suffix: str, dtype: str, shape: tuple[int, ...]) -> Array:
    """The stored tensor as unsigned integers of its item size, of exactly this type and shape."""
    tensor, itemsize = stored[suffix], ELEMENT_BYTES.get(dtype, 4)
    if tensor.dtype != dtype or tensor.shape != shape:
        raise Damaged(f"tensor {suffix} is {tensor.dtype} {tensor.shape}, not {dtype} {shape}")
    data = memoryview(tensor.data)
    if data.nbytes != math.prod(shape) * itemsize:
        raise Damaged(f"tensor {suffix} has {data.nbytes} bytes, which is not its shape")
    return np.frombuffer(data, f"<u{itemsize}").reshape(shape)


def read_frame(stored: Mapping[str, Tensor], suffix: str, out: Array) -> None:
    """Fill `out` (U8, one dimension) from a zstd frame that holds exactly its bytes."""
    tensor = stored[suffix]
    frame = memoryview(tensor.data)
    if tensor.dtype != "U8" or tensor.shape != (frame.nbytes,):
        raise Damaged(f"tensor {suffix} is {tensor.dtype} {tensor.shape}, not a compressed frame")
    inflate(frame, out, f"tensor {suffix}")


def inflate(frame: memoryview, out: Array, what: str) -> None:
    """Fill `out` (U8, one dimension) from a zstd frame; `Damaged`, naming `what`, unless it holds
    exactly so many bytes."""
    try:
        if zstandard.frame_content_size(frame) != len(out):
            raise Damaged(f"{what} does not decode to {len(out)} bytes")
        with zstandard.ZstdDecompressor().stream_reader(frame, closefd=False) as reader:
            written = reader.readinto(out)  # releases the lock; never writes past its end
    except zstandard.ZstdError as error:
        raise Damaged(f"{what} cannot be decoded: {error}") from error
    if written != len(out):
        raise Damaged(f"{what} decodes to {written} bytes, not {len(out)}")


class Scratch(threading.local):
    """Working memory of a thread, kept from block to block: fresh memory costs a page fault every
    4 KiB, which took half of the time of decoding 1,500 tokens by zstd (19 ms against 10)."""

    buffer: Array = np.empty(0, np.uint8)

    def take(self, size: int) -> Array:
        """`size` bytes; what was taken before is gone."""
        if size > len(self.buffer):
            self.buffer = np.empty(size, np.uint8)
        return self.buffer[:size]
