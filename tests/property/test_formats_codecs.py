"""Lossless codecs over any shape and any bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.codecs import CODECS, Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Plane

LOSSLESS = sorted(codec for codec in CODECS if not get_codec(codec).lossy)


@st.composite
def planes(draw: st.DrawFn) -> Plane:
    kind = draw(st.sampled_from(["elements", "rows", "pages"]))
    if kind == "elements":
        dtype = draw(st.sampled_from(["F16", "BF16", "F32", "U8"]))
        row: tuple[int, ...] = (draw(st.integers(1, 4)), draw(st.integers(1, 9)))
    else:
        dtype, row = "U8", (draw(st.integers(1, 40)),)
    return Plane(name="k", kind=kind, dtype=dtype, row=row)


@st.composite
def planes_and_rows(draw: st.DrawFn) -> tuple[Plane, np.ndarray]:
    plane = draw(planes())
    shape = plane.memory_shape(draw(st.integers(1, 3)), draw(st.integers(0, 9)))
    size = int(np.prod(shape)) * plane.itemsize
    # Short patterns repeat and compress; full-length ones do not.
    bits = draw(st.binary(min_size=size, max_size=size) | st.binary(min_size=1, max_size=4))
    data = (bits * (size // max(len(bits), 1) + 1))[:size]
    return plane, np.frombuffer(data, plane.memory_dtype).reshape(shape)


@given(case=planes_and_rows(), codec=st.sampled_from(LOSSLESS), transposed=st.booleans())
def test_rows_come_back_bit_for_bit_and_are_stored_in_no_more_bytes(
    case: tuple[Plane, np.ndarray], codec: str, transposed: bool
) -> None:
    plane, rows = case
    stored = get_codec(codec).encode(Stretch("full.k", plane, 0), rows)
    assert sum(memoryview(tensor.data).nbytes for tensor in stored.values()) <= rows.nbytes
    out = np.zeros(rows.shape[::-1] if transposed else rows.shape, rows.dtype)
    out = out.T if transposed else out
    get_codec(codec).decode(Stretch("full.k", plane, 0), stored, out)
    assert np.array_equal(out, rows)


tensors = st.builds(
    lambda dtype, data: Tensor(dtype, (len(data),), data),
    st.sampled_from(["U8", "F16", "F32", "U32"]),
    st.binary(max_size=80) | st.binary(max_size=40).map(lambda tail: b"\x28\xb5\x2f\xfd" + tail),
)


@given(
    plane=planes(),
    codec=st.sampled_from(LOSSLESS),
    stored=st.dictionaries(st.sampled_from(["", ".b0", ".b1", ".b2", ".b3", ".x"]), tensors),
)
def test_any_stored_tensors_decode_or_are_damaged(
    plane: Plane, codec: str, stored: dict[str, Tensor]
) -> None:
    out = np.empty(plane.memory_shape(1, 2), plane.memory_dtype)
    try:
        get_codec(codec).decode(Stretch("full.k", plane, 0), stored, out)
    except Damaged:
        return
    assert sum(len(tensor.data) for tensor in stored.values()) <= out.nbytes
