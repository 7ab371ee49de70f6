"""Stored tensors that lie: each is `Damaged`, and none decides how much memory is taken."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import zstandard

from kvsnap.formats.codecs import CODECS, Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Plane

F16 = Plane(name="k", kind="elements", dtype="F16", row=(2, 8))
ROWS = Plane(name="k", kind="rows", dtype="U8", row=(64,))
SHAPE = (2, 4, 64)
SIZE = 512
Compress = Callable[[bytes], bytes]


def compress(data: bytes, size_in_frame: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=size_in_frame).compress(data)


def decode(frame: bytes, shape: tuple[int, ...] | None = None, dtype: str = "U8") -> np.ndarray:
    out = np.zeros(SHAPE, np.uint8)
    stored = {".b0": Tensor(dtype, shape or (len(frame),), frame)}
    get_codec("zstd").decode(Stretch("full.k", ROWS, 0), stored, out)
    return out


def claims(size: int) -> bytes:
    """A frame header with an 8-byte content size, then one empty last block."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + struct.pack("<Q", size) + b"\x01\0\0"


def test_an_honest_frame_decodes() -> None:
    assert (decode(compress(b"\7" * SIZE)) == 7).all()
    assert (decode(b"\7" * SIZE) == 7).all()


@pytest.mark.parametrize(
    "frame",
    [
        compress(b"\7" * (SIZE - 1)),
        compress(b"\7" * (SIZE + 1)),
        compress(b""),
        compress(b"\7" * SIZE, size_in_frame=False),
        compress(b"\7" * SIZE)[:-1],
        compress(b"\7" * (SIZE // 2)) * 2,
        b"",
        b"\7" * (SIZE - 1),
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",  # a skippable frame
    ],
    ids=[
        "one byte short", "one byte long", "empty", "no size", "cut", "two halves", "nothing", "raw and short", "magic only", "skippable",
    ],
)  # fmt: skip
def test_a_frame_that_is_not_exactly_the_rows_is_damaged(frame: bytes) -> None:
    with pytest.raises(Damaged):
        decode(frame)


def test_what_follows_a_frame_decides_nothing() -> None:
    # The file digest covers such bytes; a decoder that stops at the frame's end never sees them.
    frame = compress(b"\7" * SIZE)
    for rest in (b"\0", frame, compress(b"\6" * SIZE)):
        assert (decode(frame + rest) == 7).all()


@pytest.mark.parametrize(
    "size", [0, 511, 513, 2**31, 2**32 - 1, 2**32, 2**32 + 512, 2**63, 2**64 - 3]
)
def test_a_frame_that_claims_another_size_is_damaged(size: int) -> None:
    with pytest.raises(Damaged):
        decode(claims(size))


def test_a_frame_that_claims_the_right_size_and_holds_less_is_damaged() -> None:
    with pytest.raises(Damaged):
        decode(claims(SIZE))


def test_a_bomb_takes_no_memory() -> None:
    # 64 MiB of zeros in some kilobytes, and a claim of 4 GB: neither is expanded to be refused.
    real = compress(bytes(64 * 2**20))
    unsized = compress(bytes(64 * 2**20), size_in_frame=False)
    plane = Plane(name="k", kind="rows", dtype="U8", row=(len(real) + len(unsized),))
    out = np.zeros((1, 1, plane.row[0]), np.uint8)
    for frame in (real, unsized, claims(4 * 10**9)):
        tracemalloc.start()
        try:
            with pytest.raises(Damaged):
                get_codec("zstd").decode(
                    Stretch("full.k", plane, 0), {".b0": Tensor("U8", (len(frame),), frame)}, out
                )
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("codec", [c for c in CODECS if not get_codec(c).lossy])
@pytest.mark.parametrize("change", ["missing", "extra", "renamed", "none"])
def test_the_planes_must_be_exactly_the_codecs(codec: str, change: str) -> None:
    rows = np.zeros((2, 4, 16), np.uint16)
    stored = get_codec(codec).encode(Stretch("full.k", F16, 0), rows)
    first = next(iter(stored))
    if change == "extra":
        stored[".b7"] = stored[first]
    elif change == "none":
        stored = {}
    else:
        tensor = stored.pop(first)
        if change == "renamed":
            stored[".c"] = tensor
    with pytest.raises(Damaged, match=f"codec {codec} stores"):
        get_codec(codec).decode(Stretch("full.k", F16, 0), stored, np.empty_like(rows))


@pytest.mark.parametrize("dtype", ["F16", "U32"])
def test_a_byte_plane_of_another_type_is_damaged(dtype: str) -> None:
    with pytest.raises(Damaged):
        decode(bytes(SIZE), dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("BF16", (2, 4, 2, 8)),
        ("U8", (2, 4, 2, 16)),
        ("F16", (2, 4, 16)),
        ("F16", (2, 4, 8, 2)),
        ("F16", (4, 2, 2, 8)),
        ("F16", (2, 4, 2, 4)),
        ("F16", (2, 3, 2, 8)),
        ("F16", (1, 8, 2, 8)),
    ],
)
def test_a_raw_tensor_of_another_type_or_shape_is_damaged(
    dtype: str, shape: tuple[int, ...]
) -> None:
    # Several have the right number of bytes: sizes alone must not be what saves us (A03).
    data = bytes(int(np.prod(shape)) * (1 if dtype == "U8" else 2))
    with pytest.raises(Damaged, match=r"plane full\.k is"):
        get_codec("raw").decode(
            Stretch("full.k", F16, 0),
            {"": Tensor(dtype, shape, data)},
            np.empty((2, 4, 16), np.uint16),
        )


def test_every_flipped_bit_of_a_frame_decodes_to_something_of_the_right_size_or_is_damaged() -> (
    None
):
    rows = np.arange(SIZE, dtype=np.uint16).astype(np.uint8).reshape(SHAPE)
    frame = bytearray(compress(rows.tobytes()))
    assert len(frame) < SIZE
    refused = 0
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        try:
            decode(bytes(frame))
        except Damaged:
            refused += 1
        frame[bit // 8] ^= 1 << bit % 8
    assert refused
