"""The contract of formats/codecs/base.py as tests. A codec's test file subclasses it:

    class TestMyCodec(CodecSuite):
        def make(self) -> Codec:
            return MyCodec()

A codec may refuse planes by name (`Unsupported`); of those that it takes everything below holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvsnap.formats.codecs import Codec, Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.identity import EXACT
from kvsnap.formats.layout import Array, Plane, PlaneRope

ROPE = PlaneRope(pairing="interleaved", dims=16, base=10000.0)
PLANES = {
    "k f16": Plane(name="k", kind="elements", dtype="F16", row=(2, 16), rope=ROPE),
    "v f16": Plane(name="v", kind="elements", dtype="F16", row=(2, 16)),
    "k bf16": Plane(name="k", kind="elements", dtype="BF16", row=(2, 16), rope=ROPE),
    "v f32": Plane(name="v", kind="elements", dtype="F32", row=(1, 7)),
    "k f32": Plane(name="k", kind="elements", dtype="F32", row=(1, 7)),
    "rows": Plane(name="k", kind="rows", dtype="U8", row=(34,)),
    "pages": Plane(name="k", kind="pages", dtype="U8", row=(999,)),
}
"""Every kind of plane, an odd head dimension among them."""
TOKENS = (1, 2, 3, 16, 64, 65, 256)
HEADER = 1024
"""Bytes that a codec may add to a plane's rows: lists, scales of a few tokens."""
every_plane = pytest.mark.parametrize("plane", PLANES.values(), ids=PLANES)


class CodecSuite:
    """Subclass it and give `make`; `layers`, where the codec works for one number of them only."""

    layers = 3

    def make(self) -> Codec:
        raise NotImplementedError("give the suite a codec: def make(self) -> Codec")

    def planes(self) -> dict[str, Plane]:
        return PLANES

    def rows(self, plane: Plane, tokens: int, kind: str = "normal", seed: int = 7) -> Array:
        """Bits of made-up rows: normal ones, or with what breaks codecs."""
        source = np.random.default_rng(seed)
        shape, bits = plane.memory_shape(self.layers, tokens), plane.memory_dtype
        if plane.kind != "elements" or kind == "bits":
            return source.integers(0, 2 ** (8 * plane.itemsize), shape, bits, endpoint=False)
        values = source.standard_normal(shape).astype(np.float32)
        if kind == "outliers":
            values[..., ::5] *= 100
        if kind == "constant":
            values[...] = 0.375
        if kind == "tiny":
            values *= 1e-7
        if kind == "non-finite" and tokens > 5:
            values[:, 5, 0], values[0, tokens - 1, -1] = np.inf, np.nan
        return to_bits(plane, values)

    def coded(self, plane: Plane, rows: Array, start: int = 0) -> dict[str, Tensor]:
        try:
            return self.make().encode(self.at(plane, start), rows)
        except Unsupported as error:
            pytest.skip(str(error))

    def decoded(
        self, plane: Plane, stored: Mapping[str, Tensor], like: Array, start: int = 0
    ) -> Array:
        out = np.full_like(like, np.iinfo(like.dtype).max)
        self.make().decode(self.at(plane, start), stored, out)
        return out

    def at(self, plane: Plane, start: int) -> Stretch:
        return Stretch(f"all.{plane.name}", plane, start)

    def test_it_names_itself(self) -> None:
        codec = self.make()
        assert codec.id
        assert codec.version >= 1
        assert (codec.fidelity == EXACT) is not codec.lossy
        if codec.lossy:
            assert codec.fidelity.startswith(f"{codec.id}@{codec.version}")
        assert self.make() == codec
        assert len({self.make(), codec}) == 1

    def test_it_is_found_again_by_what_it_says_of_itself(self) -> None:
        """Its table entry, or its package's entry point, and its fields as text."""
        codec = self.make()
        assert get_codec(codec.fidelity if codec.lossy else codec.id) == codec

    @every_plane
    @pytest.mark.parametrize("kind", ["normal", "outliers", "constant", "tiny", "bits"])
    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("start", [0, 64])
    def test_rows_come_back_within_the_declared_loss(
        self, plane: Plane, kind: str, tokens: int, start: int
    ) -> None:
        rows = self.rows(plane, tokens, kind)
        before = rows.copy()
        stored = self.coded(plane, rows, start)
        assert np.array_equal(rows, before)
        out = self.decoded(plane, stored, rows, start)
        self.check_loss(plane, rows, out, start)
        size = sum(memoryview(tensor.data).nbytes for tensor in stored.values())
        assert size <= rows.nbytes + HEADER

    @every_plane
    def test_tokens_that_are_no_numbers_come_back_bit_for_bit(self, plane: Plane) -> None:
        rows = self.rows(plane, 64, "non-finite")
        out = self.decoded(plane, self.coded(plane, rows, 64), rows, 64)
        if plane.can_cut:
            assert np.array_equal(out[:, 5], rows[:, 5])
            assert np.array_equal(out[0, 63], rows[0, 63])
        self.check_loss(plane, rows, out, 64)

    @every_plane
    def test_the_first_tokens_of_a_sequence_come_back_bit_for_bit(self, plane: Plane) -> None:
        # They are attention sinks: their error is everybody's.
        rows = self.rows(plane, 16)
        out = self.decoded(plane, self.coded(plane, rows), rows)
        if plane.can_cut:
            assert np.array_equal(out[:, :4], rows[:, :4])

    @every_plane
    def test_equal_rows_give_equal_bytes(self, plane: Plane) -> None:
        rows = self.rows(plane, 64)
        one, two = self.coded(plane, rows), self.coded(plane, rows.copy())
        assert {k: bytes(memoryview(t.data).cast("B")) for k, t in one.items()} == {
            k: bytes(memoryview(t.data).cast("B")) for k, t in two.items()
        }

    @every_plane
    def test_it_decodes_into_a_view(self, plane: Plane) -> None:
        if not plane.can_cut:
            pytest.skip("a page is one piece")
        rows = self.rows(plane, 64)
        stored = self.coded(plane, rows, 64)
        expected = self.decoded(plane, stored, rows, 64)
        wide = np.zeros((self.layers, 200, rows.shape[2]), rows.dtype)
        self.make().decode(self.at(plane, 64), stored, wide[:, 70:134])
        assert np.array_equal(wide[:, 70:134], expected)
        assert not wide[:, :70].any()
        assert not wide[:, 134:].any()
        columns = np.zeros((self.layers, rows.shape[2], 200), rows.dtype)  # as V may be kept
        own = columns.transpose(0, 2, 1)[:, 70:134]
        self.make().decode(self.at(plane, 64), stored, own)
        assert np.array_equal(own, expected)
        assert not columns[:, :, :70].any()
        assert not columns[:, :, 134:].any()

    @every_plane
    @pytest.mark.parametrize("tokens", [3, 64, 100])
    @pytest.mark.parametrize("start", [0, 64])
    def test_a_device_gets_the_same_bits(self, plane: Plane, tokens: int, start: int) -> None:
        torch = pytest.importorskip("torch")
        rows = self.rows(plane, tokens, "non-finite")
        stored = self.coded(plane, rows, start)
        found = self.make().decode_on("cpu", self.at(plane, start), stored, self.layers, tokens)
        own = tokens if plane.can_cut else 0
        assert tuple(found.shape) == plane.file_shape(self.layers, own)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[plane.itemsize]
        again = found.contiguous().view(bits).numpy().view(plane.memory_dtype)
        assert np.array_equal(again.reshape(rows.shape), self.decoded(plane, stored, rows, start))

    @every_plane
    def test_threads_do_not_disturb_each_other(self, plane: Plane) -> None:
        rows = [self.rows(plane, 64, seed=n) for n in range(8)]
        stored = [self.coded(plane, each, 64) for each in rows]
        alone = [self.decoded(plane, s, r, 64) for s, r in zip(stored, rows, strict=True)]
        with ThreadPoolExecutor(4) as pool:
            work = [pool.submit(self.decoded, plane, stored[n % 8], rows[0], 64) for n in range(64)]
            for number, done in enumerate(work):
                assert np.array_equal(done.result(), alone[number % 8])

    @every_plane
    def test_coding_what_was_decoded_stays_close_to_it(self, plane: Plane) -> None:
        """A block that was evicted while an engine holds its decoded rows is coded again."""
        rows = self.rows(plane, 64)
        first = self.decoded(plane, self.coded(plane, rows, 64), rows, 64)
        again = self.decoded(plane, self.coded(plane, first, 64), first, 64)
        self.check_loss(plane, first, again, 64)

    @every_plane
    def test_wrong_tensors_are_damage(self, plane: Plane) -> None:
        rows = self.rows(plane, 64)
        stored = self.coded(plane, rows, 64)
        for name, tensor in stored.items():
            data = bytes(memoryview(tensor.data).cast("B"))
            size = len(data) // max(1, int(np.prod(tensor.shape)))
            short = (*tensor.shape[:-1], tensor.shape[-1] - 1) if tensor.shape else ()
            wrong: dict[str, dict[str, Tensor]] = {
                "missing": {k: t for k, t in stored.items() if k != name},
                "another type": stored | {name: Tensor("I64", tensor.shape, data)},
                "one dimension more": stored
                | {name: Tensor(tensor.dtype, (*tensor.shape, 1), data)},
                "an unknown one": stored | {".unknown": tensor},
                "empty": stored | {name: Tensor(tensor.dtype, (0,), b"")},
            }
            if tensor.shape and tensor.shape[-1] > 1:
                cut = data[: int(np.prod(short)) * size]
                wrong["cut"] = stored | {name: Tensor(tensor.dtype, short, cut)}
            for what, tensors in wrong.items():
                with pytest.raises(Damaged) as caught:
                    self.decoded(plane, tensors, rows, 64)
                assert caught.value.what, f"{name}, {what}"

    def check_loss(self, plane: Plane, rows: Array, out: Array, start: int) -> None:
        """`AssertionError` unless every element is within the declared loss of what it was."""
        if not self.make().lossy:
            assert np.array_equal(out, rows)
            return
        bound = np.broadcast_to(self.make().max_error(self.at(plane, start), rows), rows.shape)
        assert np.isfinite(bound).all()
        same = out == rows
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(to_values(plane, out) - to_values(plane, rows))
        wrong = np.argwhere(~(same | (error <= bound)))
        assert not len(wrong), f"{len(wrong)} elements beyond the bound, the first at {wrong[0]}"


def to_bits(plane: Plane, values: Array) -> Array:
    """float32 as the plane's element bits."""
    if plane.dtype == "F16":
        return values.astype("<f2").view("<u2")
    bits = values.astype("<f4").view("<u4")
    return bits if plane.dtype == "F32" else (bits >> 16).astype("<u2")


def to_values(plane: Plane, bits: Array) -> Array:
    """Element bits as float64."""
    if plane.dtype == "F16":
        return np.ascontiguousarray(bits).view("<f2").astype(np.float64)
    wide = np.ascontiguousarray(bits).astype("<u4")
    wide = wide if plane.dtype == "F32" else wide << np.uint32(16)
    return wide.view("<f4").astype(np.float64)
