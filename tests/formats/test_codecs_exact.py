"""Lossless means bit for bit, for every codec, kind of row and bit pattern (case A54)."""

from __future__ import annotations

import itertools
from importlib.util import find_spec

import numpy as np
import pytest

from kvsnap.formats.codecs import CODECS, DEFAULT_CODEC, Stretch, compiled, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Plane

PLANES = {
    "f16": Plane(name="k", kind="elements", dtype="F16", row=(2, 16)),
    "bf16": Plane(name="k", kind="elements", dtype="BF16", row=(2, 16)),
    "f32": Plane(name="k", kind="elements", dtype="F32", row=(2, 16)),
    "int8": Plane(name="k", kind="elements", dtype="U8", row=(2, 16)),
    "rows": Plane(name="k", kind="rows", dtype="U8", row=(34,)),
    "pages": Plane(name="k", kind="pages", dtype="U8", row=(999,)),
}
LAYERS, TOKENS = 3, 16
# Sign, exponent and mantissa bits of each type's corners.
SPECIAL = {
    "F16": [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF],
    "BF16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0xFFFF],
    "F32": [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000,
            0x7F800001, 0x7FC00000, 0xFFFFFFFF],
    "U8": [0, 1, 127, 128, 255],
}  # fmt: skip
LOSSLESS = [codec for codec in CODECS if not get_codec(codec).lossy]
every = pytest.mark.parametrize(
    ("codec", "plane"), list(itertools.product(LOSSLESS, PLANES)), ids="-".join
)


def pattern(plane: Plane, kind: str) -> np.ndarray:
    shape, dtype = plane.memory_shape(LAYERS, TOKENS), plane.memory_dtype
    source = np.random.default_rng(54)
    if kind == "random bits":
        return source.integers(0, 2 ** (8 * plane.itemsize), shape, dtype)
    if kind == "special":
        return np.resize(np.array(SPECIAL[plane.dtype], dtype), shape)
    if kind == "constant":
        return np.full(shape, SPECIAL[plane.dtype][-2], dtype)
    # Numbers around zero, as K and V are: their high byte compresses, their low ones do not.
    normal = source.standard_normal(shape).astype(np.float32)
    top = np.float16(normal) if plane.dtype == "F16" else normal
    bits = top.view(f"<u{top.itemsize}") >> (8 * max(0, top.itemsize - plane.itemsize))
    return bits.astype(dtype)


@every
@pytest.mark.parametrize("kind", ["random bits", "special", "constant", "normal"])
def test_every_bit_comes_back(codec: str, plane: str, kind: str) -> None:
    rows = pattern(PLANES[plane], kind)
    before = rows.copy()
    stored = get_codec(codec).encode(Stretch("full.k", PLANES[plane], 0), rows)
    assert np.array_equal(rows, before)
    out = np.zeros_like(rows)
    get_codec(codec).decode(Stretch("full.k", PLANES[plane], 0), stored, out)
    assert np.array_equal(out, rows)


@every
@pytest.mark.parametrize("kind", ["random bits", "special", "constant", "normal"])
def test_the_stored_tensors_are_never_larger_than_the_rows(
    codec: str, plane: str, kind: str
) -> None:
    rows = pattern(PLANES[plane], kind)
    stored = get_codec(codec).encode(Stretch("full.k", PLANES[plane], 0), rows)
    assert sum(memoryview(tensor.data).nbytes for tensor in stored.values()) <= rows.nbytes


@every
def test_encoding_is_deterministic_and_says_its_true_shapes(codec: str, plane: str) -> None:
    rows = pattern(PLANES[plane], "normal")
    one = get_codec(codec).encode(Stretch("full.k", PLANES[plane], 0), rows)
    two = get_codec(codec).encode(Stretch("full.k", PLANES[plane], 0), rows.copy())
    sizes = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4}
    assert one.keys() == two.keys()
    for suffix, tensor in one.items():
        data = memoryview(tensor.data)
        assert data.c_contiguous
        assert data.nbytes == np.prod(tensor.shape) * sizes[tensor.dtype]
        assert bytes(data.cast("B")) == bytes(memoryview(two[suffix].data).cast("B"))


@every
def test_no_rows_at_all_come_back_too(codec: str, plane: str) -> None:
    shape = PLANES[plane].memory_shape(LAYERS, 0)
    empty = np.empty(shape, PLANES[plane].memory_dtype)
    stored = get_codec(codec).encode(Stretch("full.k", PLANES[plane], 0), empty)
    get_codec(codec).decode(Stretch("full.k", PLANES[plane], 0), stored, np.empty_like(empty))


@pytest.mark.parametrize("plane", ["f16", "bf16", "f32"])
def test_zstd_makes_numbers_like_keys_and_values_smaller(plane: str) -> None:
    rows = pattern(PLANES[plane], "normal").repeat(20, axis=1)
    stored = get_codec("zstd").encode(Stretch("full.k", PLANES[plane], 0), rows)
    assert sum(memoryview(t.data).nbytes for t in stored.values()) < 0.98 * rows.nbytes


def test_zstd_splits_elements_into_byte_planes_the_lowest_first() -> None:
    plane = Plane(name="k", kind="elements", dtype="F16", row=(1, 4))
    rows = np.array([[[0x1122, 0x3344, 0x5566, 0x7788]]], np.uint16)
    stored = get_codec("zstd").encode(Stretch("full.k", plane, 0), rows)
    assert {suffix: bytes(tensor.data) for suffix, tensor in stored.items()} == {
        ".b0": b"\x22\x44\x66\x88",
        ".b1": b"\x11\x33\x55\x77",
    }


def test_raw_keeps_the_shape_that_other_readers_understand() -> None:
    shapes = {}
    for name, plane in PLANES.items():
        stored = get_codec("raw").encode(Stretch("full.k", plane, 0), pattern(plane, "normal"))
        shapes[name] = [(s, t.dtype, t.shape) for s, t in stored.items()]
    assert shapes == {
        "f16": [("", "F16", (3, 16, 2, 16))],
        "bf16": [("", "BF16", (3, 16, 2, 16))],
        "f32": [("", "F32", (3, 16, 2, 16))],
        "int8": [("", "U8", (3, 16, 2, 16))],
        "rows": [("", "U8", (3, 16, 34))],
        "pages": [("", "U8", (3, 999))],
    }


def test_the_table_gives_each_id_its_codec() -> None:
    assert DEFAULT_CODEC in CODECS
    assert {codec: get_codec(codec).id for codec in CODECS} == {codec: codec for codec in CODECS}


@pytest.mark.parametrize("codec", ["", "lz4", "RAW", "raw ", "json:loads", "../raw"])
def test_an_unknown_id_names_the_known_ones(codec: str) -> None:
    with pytest.raises(Unsupported) as caught:
        get_codec(codec)
    assert repr(codec) in caught.value.what
    assert all(known in caught.value.hint for known in CODECS)


def test_decoded_rows_are_the_callers_own_not_views_of_the_file() -> None:
    plane, data = PLANES["int8"], bytearray(LAYERS * TOKENS * 32)
    out = np.empty(plane.memory_shape(LAYERS, TOKENS), np.uint8)
    get_codec("raw").decode(
        Stretch("full.k", plane, 0), {"": Tensor("U8", (3, 16, 2, 16), memoryview(data))}, out
    )
    data[0] = 1
    assert out[0, 0, 0] == 0


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_compiled_joining_of_byte_planes_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "_allowed", True)
    compiled.joiner.cache_clear()
    try:
        assert compiled.joiner() is not None
        for plane in (PLANES["f16"], PLANES["f32"]):
            rows, at = pattern(plane, "random bits"), Stretch("full.k", plane, 0)
            out = np.empty_like(rows)
            get_codec("zstd").decode(at, get_codec("zstd").encode(at, rows), out)
            assert np.array_equal(out, rows)
    finally:
        compiled.joiner.cache_clear()
