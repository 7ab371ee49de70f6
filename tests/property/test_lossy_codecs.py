"""Codecs that round, over any shape, type and bits: what they declare holds, whatever is in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.formats.codecs import Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array, Plane, PlaneRope

LOSSY = ["q8", "q4"]
SINKS = 4
DTYPES = {"F16": np.uint16, "BF16": np.uint16, "F32": np.uint32}


def floats(dtype: str, rows: Array) -> Array:
    wide = rows.astype(np.uint32) << 16 if dtype == "BF16" else rows
    with np.errstate(invalid="ignore"):  # signalling NaN
        return wide.view(np.float16 if dtype == "F16" else np.float32).astype(np.float64)


def bits_of(dtype: str, values: Array) -> Array:
    with np.errstate(over="ignore"):
        if dtype == "F16":
            return values.astype(np.float16).view(np.uint16)
        bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


@st.composite
def stretches(draw: st.DrawFn, tokens: st.SearchStrategy[int]) -> tuple[Stretch, Array]:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    row = (draw(st.integers(1, 3)), draw(st.integers(1, 9) | st.just(64)))
    rope = None
    if row[1] % 2 == 0 and draw(st.booleans()):
        pairing = draw(st.sampled_from(["halves", "interleaved"]))
        rope = PlaneRope(pairing=pairing, dims=row[1], base=10000.0)
    name = draw(st.sampled_from(["k", "v", "latent"]))
    plane = Plane(name=name, kind="elements", dtype=dtype, row=row, rope=rope)
    at = Stretch(f"full.{name}", plane, draw(st.sampled_from([0, 2, 64, 100_000])))
    layers, count = draw(st.integers(1, 3)), draw(tokens)
    shape = plane.memory_shape(layers, count)
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["normal", "tiny", "huge", "bits", "constant", "zero"]))
    largest = 65504.0 if dtype == "F16" else 3e38
    scale = {"normal": 1, "tiny": {"F16": 1e-7}.get(dtype, 1e-42), "huge": largest / 4}.get(kind, 0)
    if kind == "bits":
        rows = source.integers(0, 2 ** (8 * plane.itemsize), shape, DTYPES[dtype])
    else:
        values = source.standard_normal(shape) * scale + (3.7 if kind == "constant" else 0)
        values[..., :: draw(st.integers(2, 9))] *= draw(st.sampled_from([1, 0, -1, 30, 100]))
        rows = bits_of(dtype, values)
    specials = np.array([np.nan, np.inf, -np.inf, -0.0, largest, -largest, 1e-45, 6e-8])
    for _ in range(draw(st.integers(0, 3)) if rows.size else 0):
        rows[tuple(draw(st.integers(0, n - 1)) for n in shape)] = bits_of(
            dtype, specials[draw(st.integers(0, 7)), None]
        )[0]
    return at, rows


def decoded(codec: str, at: Stretch, stored: dict[str, Tensor], like: Array) -> Array:
    out = np.full(like.shape, 0xABCD, like.dtype)
    get_codec(codec).decode(at, stored, out)
    return out


def check_bound(codec: str, at: Stretch, rows: Array, out: Array) -> None:
    bound = get_codec(codec).max_error(at, rows)
    assert bound.dtype == np.float32
    bound = np.broadcast_to(bound, rows.shape).astype(np.float64)
    same = rows == out
    with np.errstate(invalid="ignore"):
        loss = np.abs(floats(at.plane.dtype, rows) - floats(at.plane.dtype, out))
    assert (same | (loss <= bound)).all()
    assert same[(bound == 0) & (floats(at.plane.dtype, rows) != 0)].all()


@pytest.mark.parametrize("codec", LOSSY)
@given(case=stretches(st.integers(0, 20) | st.integers(1, 256)))
def test_every_decoded_element_is_within_the_declared_bound(
    codec: str, case: tuple[Stretch, Array]
) -> None:
    at, rows = case
    stored = get_codec(codec).encode(at, rows)
    out = decoded(codec, at, stored, rows)
    check_bound(codec, at, rows, out)
    lost = ~np.isfinite(floats(at.plane.dtype, rows))
    assert (out[lost] == rows[lost]).all()
    if at.start == 0:
        assert (out[:, :SINKS] == rows[:, :SINKS]).all()
    again = get_codec(codec).encode(at, out)
    check_bound(codec, at, out, decoded(codec, at, again, rows))


@pytest.mark.parametrize("codec", LOSSY)
@given(case=stretches(st.integers(0, 130)))
def test_equal_rows_give_equal_bytes_of_bounded_size(
    codec: str, case: tuple[Stretch, Array]
) -> None:
    at, rows = case
    stored = get_codec(codec).encode(at, rows)
    again = get_codec(codec).encode(at, rows.copy())
    assert {k: (t.dtype, t.shape, bytes(t.data)) for k, t in stored.items()} == {
        k: (t.dtype, t.shape, bytes(t.data)) for k, t in again.items()
    }
    assert (
        sum(memoryview(t.data).nbytes for t in stored.values()) <= rows.nbytes + 4 * rows.shape[1]
    )


@pytest.mark.parametrize("codec", LOSSY)
@given(case=stretches(st.integers(1, 80)), data=st.data())
def test_stored_tensors_that_were_changed_decode_or_are_damaged(
    codec: str, case: tuple[Stretch, Array], data: st.DataObject
) -> None:
    at, rows = case
    stored = get_codec(codec).encode(at, rows)
    suffix = data.draw(st.sampled_from(sorted(stored)))
    tensor = stored[suffix]
    content = bytearray(tensor.data)
    shape: tuple[Any, ...] = tensor.shape
    change = data.draw(st.sampled_from(["bit", "cut", "longer", "shape", "dtype", "gone", "extra"]))
    dtype = tensor.dtype
    if change == "bit" and content:
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    elif change == "cut":
        del content[len(content) // 2 :]
        shape = (len(content),) if len(shape) == 1 else shape
    elif change == "longer":
        content += b"\0" * 4
    elif change == "shape":
        shape = data.draw(st.sampled_from([shape[::-1], (*shape, 1), (), (2**40,), shape[1:]]))
    elif change == "dtype":
        dtype = data.draw(st.sampled_from(["U8", "F16", "BF16", "F32", "U32"]))
    changed = stored | {suffix: Tensor(dtype, shape, bytes(content))}
    if change == "gone":
        del changed[suffix]
    elif change == "extra":
        changed[".x"] = tensor
    try:
        decoded(codec, at, changed, rows)
    except Damaged:
        return
    assert change not in ("gone", "extra")
