"""`kvtc`: what it keeps, what it refuses, and that its codes are exact integers of a known file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.codecs import Codec, entropy, get_codec
from kvsnap.formats.codecs.base import Stretch
from kvsnap.formats.codecs.calibration import (
    Calibration,
    pack_calibration,
    parse_calibration,
    register,
)
from kvsnap.formats.codecs.kvtc import Kvtc
from kvsnap.formats.codecs.rope import rotate
from kvsnap.formats.container import Packed, Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import Array, Plane, PlaneRope
from kvsnap.kvstore.measure.calibrate import Samples, calibrate
from kvsnap.testing.codec_suite import ROPE, CodecSuite

LAYERS, ROW = 4, (2, 8)
WIDTH = LAYERS * ROW[0] * ROW[1]
STEP = 0.05
GOLDEN_ZEROS = [4093, 4055, 3563, 2387, 1317, 675, 341, 173]
GOLDEN_CODE = (
    "ffffff5fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffef03e01100"
    "83a0fe42300576f72ba8c477c4d705c89a3754b8429894e7c047ffffffffffffff8fff5fffcfb195"
    "d3ab7a3955d4db2e7c858949c929a8b47a23198561d84e1b82f07e082100d8ffd9ffdaffdbffdcff"
    "ddffdeffdfffe0ffe1ffe2ffe3ffe4ffe5ffe6ffe7ffe8ffe9ffeaffebffecffedffeeff21002200"
    "230024002500260027002800"
)
HALVES = PlaneRope(pairing="halves", dims=6, base=100.0)
MIX = np.random.default_rng(5).standard_normal((WIDTH, WIDTH)) * 0.9 ** np.arange(WIDTH)[:, None]
"""Makes neighbouring channels and layers alike, as those of a model are."""


def vectors(tokens: int, seed: int) -> Array:
    """float32 [layers, tokens, heads, dim], not rotated."""
    drawn = np.random.default_rng(seed).standard_normal((tokens, WIDTH)) @ MIX + 0.5
    return drawn.reshape(tokens, LAYERS, *ROW).swapaxes(0, 1).astype(np.float32)


def narrow(dtype: str, values: Array) -> Array:
    rows = values.reshape(LAYERS, -1, ROW[0] * ROW[1])
    if dtype == "F16":
        return rows.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


def widen(dtype: str, rows: Array) -> Array:
    if dtype == "F16":
        return rows.view(np.float16).astype(np.float32)
    return (rows.astype(np.uint32) << 16 if dtype == "BF16" else rows).view(np.float32)


def stretch(dtype: str = "F16", start: int = 64, rope: PlaneRope | None = HALVES) -> Stretch:
    plane = Plane(name="k", kind="elements", dtype=dtype, row=ROW, rope=rope)
    return Stretch("full.k", plane, start)


def keys(at: Stretch, tokens: int = 64, seed: int = 1) -> Array:
    values = vectors(tokens, seed)
    if at.plane.rope is not None:
        rotate(at.plane.rope, values, at.start)
    return narrow(at.plane.dtype, values)


def roundtrip(codec: Kvtc, at: Stretch, rows: Array) -> tuple[dict[str, Tensor], Array]:
    stored = codec.encode(at, rows)
    out = np.full_like(rows, 0x5A5A)
    codec.decode(at, stored, out)
    return stored, out


def size(stored: dict[str, Tensor]) -> int:
    return sum(memoryview(tensor.data).nbytes for tensor in stored.values())


@pytest.fixture(scope="module")
def calibration(whole: Callable[[Packed], bytes]) -> Calibration:
    turned = vectors(600, 2)
    rotate(HALVES, turned, 0)
    values = turned.swapaxes(0, 1)
    gradients = np.random.default_rng(3).standard_normal(values.shape).astype(np.float32)
    samples = Samples(values, gradients, np.arange(600), HALVES)
    plain = replace(samples, values=vectors(600, 2).swapaxes(0, 1), rope=None)
    made = calibrate("m", {"full.k": samples, "full.v": plain}, finest=0.02, widest=WIDTH // 2)
    return parse_calibration(memoryview(whole(pack_calibration(made))))


@pytest.fixture
def codec(calibration: Calibration) -> Kvtc:
    return Kvtc(register(calibration), STEP)


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    list(itertools.product(["F16", "BF16", "F32"], [0, 1, 5, 15, 16, 63, 64, 65, 200])),
)
def test_every_element_is_within_its_bound(codec: Kvtc, dtype: str, tokens: int) -> None:
    at = stretch(dtype)
    rows = keys(at, tokens)
    stored, out = roundtrip(codec, at, rows)
    off = np.abs(widen(dtype, out) - widen(dtype, rows))
    assert (off <= codec.max_error(at, rows)).all()
    assert ".kept" not in stored or not tokens
    assert size(stored) <= rows.nbytes


def test_it_is_small_and_a_larger_step_is_smaller_and_further_off(codec: Kvtc) -> None:
    at = stretch()
    rows, sizes, errors = keys(at, 256), [], []
    for step in (0.02, 0.05, 0.2, 1.0):
        stored, out = roundtrip(replace(codec, step=step), at, rows)
        sizes.append(size(stored))
        errors.append(np.abs(widen("F16", out) - widen("F16", rows)).mean())
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert sizes[1] < rows.nbytes / 2.5


def test_rotation_is_undone_at_the_rows_own_position(codec: Kvtc) -> None:
    sizes = {
        (start, claimed): size(
            codec.encode(stretch(start=claimed), keys(stretch(start=start), 128, seed=9))
        )
        for start, claimed in ((64, 64), (1000, 1000), (1000, 64))
    }
    assert abs(sizes[64, 64] - sizes[1000, 1000]) < 0.03 * sizes[64, 64]
    assert sizes[1000, 64] > 1.03 * sizes[64, 64]


def test_pairs_may_be_interleaved(codec: Kvtc) -> None:
    """GGUF files permute what transformers keeps in halves; one calibration serves both."""
    halves, interleaved = stretch(), stretch(rope=replace(HALVES, pairing="interleaved"))
    rows = keys(halves, 64)
    order = [0, 3, 1, 4, 2, 5, 6, 7]
    moved = rows.reshape(LAYERS, 64, *ROW)[..., order].reshape(rows.shape)
    one, out = roundtrip(codec, halves, rows)
    two, moved_out = roundtrip(codec, interleaved, np.ascontiguousarray(moved))
    assert size(one) == size(two)
    found = widen("F16", out).reshape(LAYERS, 64, *ROW)[..., order].reshape(rows.shape)
    assert np.allclose(found, widen("F16", moved_out), atol=0.02)


def test_the_first_four_tokens_of_a_sequence_are_exact_and_no_others(codec: Kvtc) -> None:
    for start, exact in ((0, 4), (2, 2), (4, 0)):
        at = stretch(start=start)
        rows = keys(at)
        stored, out = roundtrip(codec, at, rows)
        same = (out == rows).all(axis=(0, 2))
        assert same[:exact].all()
        assert not same[exact:].any()
        assert (".exact" in stored) == bool(exact)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_what_cannot_be_coded_is_exact_and_costs_the_others_nothing(
    codec: Kvtc, dtype: str
) -> None:
    at = stretch(dtype)
    rows = keys(at)
    top = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}[dtype]
    bent = rows.copy()
    for token, value in ((3, top), (9, top + 1), (20, 2 * top + 7), (40, top - 1), (50, top - 40)):
        bent[token % LAYERS, token, 5] = value
    stored, out = roundtrip(codec, at, bent)
    kept = [3, 9, 20, 40, 50]
    assert np.frombuffer(stored[".kept"].data, "<u4").tolist() == kept
    assert np.array_equal(out[:, kept], bent[:, kept])
    others = np.delete(np.arange(64), kept)
    off = np.abs(widen(dtype, out[:, others]) - widen(dtype, rows[:, others]))
    assert (off <= codec.max_error(at, bent)[:, others]).all()


def test_rows_unlike_the_calibration_are_within_the_bound_or_exact(codec: Kvtc) -> None:
    at = stretch()
    source = np.random.default_rng(4)
    for scale in (0, 1e-6, 30, 3000):
        rows = narrow("F16", scale * source.standard_normal((LAYERS, 64, *ROW)))
        stored, out = roundtrip(codec, at, rows)
        off = np.abs(widen("F16", out) - widen("F16", rows))
        assert (off <= codec.max_error(at, rows)).all()
        assert size(stored) <= rows.nbytes + 4 * 64
    noise = source.integers(0, 2**16, rows.shape, np.uint16)
    stored, out = roundtrip(codec, at, noise)
    assert size(stored) <= noise.nbytes + 4 * 64


def test_equal_rows_are_equal_bytes_and_are_left_alone(codec: Kvtc) -> None:
    at = stretch()
    rows = keys(at)
    before = rows.copy()
    one, two = codec.encode(at, rows), codec.encode(at, rows.copy())
    assert np.array_equal(rows, before)
    assert {k: bytes(t.data) for k, t in one.items()} == {k: bytes(t.data) for k, t in two.items()}


def test_it_decodes_into_views(codec: Kvtc) -> None:
    at = stretch(start=0)
    rows = keys(at)
    stored, out = roundtrip(codec, at, rows)
    buffer = np.zeros((LAYERS, 100, rows.shape[2]), np.uint16)
    codec.decode(at, stored, buffer[:, 20:84])
    assert np.array_equal(buffer[:, 20:84], out)
    assert not buffer[:, :20].any()
    assert not buffer[:, 84:].any()


def test_it_needs_its_calibration(codec: Kvtc) -> None:
    at = stretch()
    rows = keys(at)
    for wrong in (Kvtc(), Kvtc("ab" * 32, STEP)):
        with pytest.raises(Unsupported, match="calibration"):
            wrong.encode(at, rows)
        with pytest.raises(Unsupported, match="calibration"):
            wrong.decode(at, codec.encode(at, rows), np.empty_like(rows))


def test_planes_that_are_not_calibrated_are_unsupported(codec: Kvtc) -> None:
    rows = keys(stretch())
    plane = stretch().plane
    with pytest.raises(Unsupported, match="no plane"):
        codec.encode(replace(stretch(), name="window.k"), rows)
    with pytest.raises(Unsupported, match="no plane"):
        codec.encode(stretch(), np.ascontiguousarray(rows[1:]))
    with pytest.raises(Unsupported, match="no plane"):
        codec.encode(replace(stretch(), plane=replace(plane, row=(1, 16))), rows)
    packed = Plane(name="k", kind="rows", dtype="U8", row=(16,))
    with pytest.raises(Unsupported, match="rows"):
        codec.encode(Stretch("full.k", packed, 0), rows.view(np.uint8))


@pytest.mark.parametrize("step", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_steps_are_refused(step: float) -> None:
    with pytest.raises(Unsupported, match="step"):
        Kvtc("ab" * 32, step)


def test_a_step_finer_than_the_calibration_is_refused(codec: Kvtc) -> None:
    with pytest.raises(Unsupported, match="good for steps"):
        replace(codec, step=0.01).encode(stretch(), keys(stretch()))


def test_the_fidelity_names_the_calibration_and_the_step(codec: Kvtc) -> None:
    assert codec.fidelity == f"kvtc@1;calibration={codec.calibration};step=0.05"
    assert get_codec(codec.fidelity) == codec


def _bend(stored: dict[str, Tensor], suffix: str, **changes: Any) -> dict[str, Tensor]:
    return {**stored, suffix: replace(stored[suffix], **changes)}


def test_hostile_tensors_are_damaged(codec: Kvtc) -> None:
    at = stretch(start=0)
    rows = keys(at)
    stored = codec.encode(at, rows)
    codes = bytes(stored[".codes"].data)

    def coded(data: bytes) -> dict[str, Tensor]:
        return _bend(stored, ".codes", data=data, shape=(len(data),))

    cases = [
        coded(b""),
        coded(codes[:3]),
        coded(codes[:-2]),
        coded(codes + b"\0\0"),
        coded(b"\xff\xff\xff\xff" + codes[4:]),
        _bend(stored, ".codes", dtype="F16", shape=(len(codes) // 2,)),
        _bend(stored, ".codes", shape=(1, len(codes))),
        {".codes": stored[".codes"]},
        {".exact": stored[".exact"], ".kept": stored[".kept"]},
        {},
        {**stored, ".more": stored[".kept"]},
    ]
    for case in cases:
        with pytest.raises(Damaged):
            codec.decode(at, case, np.empty_like(rows))


def test_flipped_bits_are_damaged_or_decode_to_something(codec: Kvtc) -> None:
    at = stretch()
    rows = keys(at)
    stored = codec.encode(at, rows)
    codes = bytes(stored[".codes"].data)
    damaged = 0
    for place in range(0, len(codes), 5):
        data = bytearray(codes)
        data[place] ^= 1 << place % 8
        try:
            codec.decode(at, _bend(stored, ".codes", data=bytes(data)), np.empty_like(rows))
        except Damaged:
            damaged += 1
    assert damaged > 0


@pytest.mark.parametrize("count", [0, 1, 127, 128, 1000, 70_000])
def test_entropy_codes_give_every_value_back(count: int) -> None:
    source = np.random.default_rng(count)
    classes = source.integers(0, entropy.CLASSES, count).astype(np.uint8)
    spread = 2.0 ** ((classes.astype(float) - entropy.MIDDLE) / entropy.PER_OCTAVE)
    values = np.rint(source.logistic(size=count) * spread).clip(-32768, 32767).astype(np.int16)
    values[: count // 10] = source.integers(-32768, 32768, count // 10)
    for extra in (b"", b"ab", b"1234567890" * 1000):
        code = entropy.encode(values, classes, extra)
        found, beside = entropy.decode(memoryview(code), classes)
        assert np.array_equal(found, values)
        assert beside == extra
        for wrong in (code[:-2], code + b"\0\0", code[:-1]):
            with pytest.raises(Damaged):
                entropy.decode(memoryview(wrong), classes)


def test_extra_bytes_cost_next_to_nothing_beside_values() -> None:
    values, classes = np.zeros(60_000, np.int16), np.zeros(60_000, np.uint8)
    sizes = [len(entropy.encode(values, classes, b"x" * n)) for n in (0, 500, 1000)]
    assert sizes[1] < sizes[0] + 60
    assert sizes[2] > sizes[1] + 450


def test_entropy_codes_are_near_the_entropy() -> None:
    source = np.random.default_rng(6)
    for number in (4, 12, 16, 24, 40):
        spread = 2.0 ** ((number - entropy.MIDDLE) / entropy.PER_OCTAVE)
        values = np.rint(source.logistic(size=60_000) * 0.75 * spread).astype(np.int16)
        _, counts = np.unique(values, return_counts=True)
        ideal = -(counts * np.log2(counts / 60_000)).sum() / 8 + 500
        code = entropy.encode(values, np.full(60_000, number, np.uint8), b"x" * 500)
        assert len(code) < 1.01 * ideal + 600


def test_entropy_tables_are_these() -> None:
    """Another table reads other values from the same bytes: it would be another codec version."""
    values = np.arange(-40, 41).astype(np.int16)
    classes = np.arange(81).astype(np.uint8) % entropy.CLASSES
    frequency, _, _ = entropy._tables()
    assert (frequency.sum(axis=1) == 4096).all()
    assert frequency[:, 127].tolist()[:: entropy.PER_OCTAVE] == GOLDEN_ZEROS
    assert entropy.encode(values, classes).hex() == GOLDEN_CODE


class TestKvtc(CodecSuite):
    def make(self) -> Codec:
        return Kvtc(_suite_calibration(), STEP)


@functools.cache
def _suite_calibration() -> str:
    values, gradients = np.random.default_rng(8).standard_normal((2, 400, 3, 2, 16))
    samples = Samples(
        values.astype(np.float16), gradients.astype(np.float16) * 4, np.arange(400), ROPE
    )
    made = calibrate("m", {"all.k": samples, "all.v": replace(samples, rope=None)}, finest=0.01)
    file = b"".join(bytes(part) for part in pack_calibration(made).buffers)
    return register(parse_calibration(memoryview(file)))
