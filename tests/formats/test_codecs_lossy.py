"""Codecs that round: what they keep, what they refuse, and that every implementation agrees."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import zstandard

from kvsnap.formats.codecs import Stretch, compiled, get_codec, uniform
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import Array, Plane

LOSSY = ["q8", "q4"]
LAYERS, TOKENS, ROW = 3, 64, (2, 16)
SOURCE = np.random.default_rng(11)
VALUES = SOURCE.standard_normal((LAYERS, TOKENS, 32)) * np.where(np.arange(32) % 7, 1, 20)


def stretch(dtype: str = "F16", name: str = "k", start: int = 64) -> Stretch:
    return Stretch(f"full.{name}", Plane(name=name, kind="elements", dtype=dtype, row=ROW), start)


def rows_of(dtype: str = "F16", values: Array = VALUES) -> Array:
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return (bits >> 16).astype(np.uint16) if dtype == "BF16" else bits


def decode(codec: str, at: Stretch, stored: dict[str, Tensor], rows: Array) -> Array:
    out = np.full_like(rows, 0x5A5A)
    get_codec(codec).decode(at, stored, out)
    return out


def size(stored: dict[str, Tensor]) -> int:
    return sum(memoryview(tensor.data).nbytes for tensor in stored.values())


@pytest.mark.parametrize("codec", LOSSY)
def test_the_first_four_tokens_of_a_sequence_are_exact_and_no_others(codec: str) -> None:
    rows = rows_of()
    for start, exact in ((0, 4), (2, 2), (4, 0), (64, 0)):
        at = stretch(start=start)
        stored = get_codec(codec).encode(at, rows)
        out = decode(codec, at, stored, rows)
        same = (out == rows).all(axis=(0, 2))
        assert same[:exact].all()
        assert not same[exact:].any()
        assert (".exact" in stored) == bool(exact)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_sink_does_not_coarsen_the_other_tokens(codec: str) -> None:
    values = VALUES.copy()
    values[:, :4] *= 1000
    calm, wild = rows_of(), rows_of(values=values)
    at = stretch(start=0)
    out = [decode(codec, at, get_codec(codec).encode(at, rows), rows) for rows in (calm, wild)]
    assert (out[0][:, 4:] == out[1][:, 4:]).all()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("name", ["k", "v"])
def test_tokens_with_nan_or_infinity_are_exact_in_every_layer(
    codec: str, dtype: str, name: str
) -> None:
    values = VALUES.copy()
    values[0, 9, 3], values[1, 40, 0], values[2, 40, 31] = np.nan, np.inf, -np.inf
    rows, at = rows_of(dtype, values), stretch(dtype, name)
    stored = get_codec(codec).encode(at, rows)
    assert np.frombuffer(stored[".kept"].data, "<u4").tolist() == [9, 40]
    out = decode(codec, at, stored, rows)
    assert (out[:, [9, 40]] == rows[:, [9, 40]]).all()
    assert (out[:, 10] != rows[:, 10]).any()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("tokens", [0, 1, 4, 63, 65, 200])
def test_decoding_fills_a_view_and_touches_nothing_else(
    codec: str, dtype: str, tokens: int
) -> None:
    rows = rows_of(dtype, SOURCE.standard_normal((LAYERS, tokens, 32)))
    at = stretch(dtype, start=2)
    stored = get_codec(codec).encode(at, rows)
    whole = np.full((LAYERS, tokens + 50, 32), 0x1234, rows.dtype)
    get_codec(codec).decode(at, stored, whole[:, 20 : 20 + tokens])
    assert (whole[:, 20 : 20 + tokens] == decode(codec, at, stored, rows)).all()
    assert (np.delete(whole, slice(20, 20 + tokens), axis=1) == 0x1234).all()


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "plane",
    [
        Plane(name="k", kind="elements", dtype="U8", row=(2, 16)),
        Plane(name="k", kind="rows", dtype="U8", row=(32,)),
        Plane(name="k", kind="pages", dtype="U8", row=(32,)),
    ],
    ids=["bytes", "rows", "pages"],
)
def test_rows_that_cannot_be_rounded_are_refused_by_kind(codec: str, plane: Plane) -> None:
    rows, at = np.zeros(plane.memory_shape(1, 4), np.uint8), Stretch("full.k", plane, 0)
    with pytest.raises(Unsupported, match=f"codec {codec} cannot take plane k: {plane.kind}"):
        get_codec(codec).encode(at, rows)
    with pytest.raises(Unsupported):
        get_codec(codec).decode(at, {}, rows)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("name", ["k", "v"])
def test_nothing_is_stored_twice_where_a_code_saves_nothing(codec: str, name: str) -> None:
    plane = Plane(name=name, kind="elements", dtype="BF16", row=(2, 1))
    at, rows = Stretch(f"full.{name}", plane, 64), rows_of("BF16", VALUES[:, :5, :2])
    stored = get_codec(codec).encode(at, rows)
    assert (decode(codec, at, stored, rows) == rows).all()
    assert size(stored) <= rows.nbytes + 4 * 5


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "kept",
    [[3, 2], [1, 1], [0, 64], [2**32 - 1], list(range(65))],
    ids=["falling", "twice", "after the end", "far after the end", "too many"],
)
def test_a_list_of_kept_tokens_that_is_not_the_blocks_is_damaged(
    codec: str, kept: list[int]
) -> None:
    at, rows = stretch(), rows_of()
    stored = get_codec(codec).encode(at, rows)
    exact = Tensor("F16", (LAYERS, len(kept), *ROW), bytes(LAYERS * len(kept) * 64))
    tokens = Tensor("U32", (len(kept),), np.array(kept, "<u4"))
    with pytest.raises(Damaged, match="kept exactly"):
        decode(codec, at, stored | {".kept": tokens, ".exact": exact}, rows)


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_a_scale_that_would_overflow_is_damaged(dtype: str) -> None:
    at, rows = stretch(dtype), rows_of(dtype)
    stored = get_codec("q8").encode(at, rows)
    scale = stored[".scale"]
    high = Tensor(scale.dtype, scale.shape, b"\xff" * memoryview(scale.data).nbytes)
    with pytest.raises(Damaged, match="impossible scale"):
        decode("q8", at, stored | {".scale": high}, rows)
    stored = get_codec("q4").encode(at, rows)
    plain = zstandard.ZstdDecompressor().decompress(stored[".steps"].data)
    for position, found in (
        (slice(0, 1 if dtype == "F16" else 2), "scale"),
        (slice(-1, None), "step"),
    ):
        sides = bytearray(plain)
        sides[position] = b"\xff" * len(sides[position])
        frame = zstandard.ZstdCompressor().compress(bytes(sides))
        changed = stored | {".steps": Tensor("U8", (len(frame),), frame)}
        with pytest.raises(Damaged, match=f"impossible {found}"):
            decode("q4", at, changed, rows)


@pytest.mark.parametrize("suffix", [".codes", ".steps"])
def test_a_frame_of_another_size_is_damaged(suffix: str) -> None:
    at, rows = stretch(), rows_of()
    stored = get_codec("q4").encode(at, rows)
    plain = zstandard.ZstdDecompressor().decompress(stored[suffix].data)
    for wrong in (plain[:-1], plain + b"\0", b"", plain * 1000):
        frame = zstandard.ZstdCompressor().compress(wrong)
        with pytest.raises(Damaged, match="does not decode to"):
            decode("q4", at, stored | {suffix: Tensor("U8", (len(frame),), frame)}, rows)
    frame = bytes(stored[suffix].data)
    for cut in (frame[:-1], frame[:9], b"", b"\x28\xb5\x2f\xfd"):
        with pytest.raises(Damaged):
            decode("q4", at, stored | {suffix: Tensor("U8", (len(cut),), cut)}, rows)


@pytest.mark.parametrize("step", ["0", "-1", "nan", "inf", "17"])
def test_a_step_that_makes_no_sense_is_refused(step: str) -> None:
    with pytest.raises(Unsupported, match="no step of"):
        get_codec(f"q4;step={step}")


def test_the_step_is_part_of_the_fidelity() -> None:
    assert get_codec("q4").fidelity == "q4@1;step=0.2"
    assert get_codec("q8").fidelity == "q8@1"


def test_a_token_with_a_short_v_gets_a_finer_step() -> None:
    values = VALUES.copy()
    values[:, 7] /= 8
    at, rows = stretch(name="v"), rows_of(values=values)
    bound = get_codec("q4").max_error(at, rows)
    assert (bound[:, 7] == bound[:, 20] / 4).all()
    at = stretch(name="k")
    bound = get_codec("q4").max_error(at, rows)
    assert (bound[:, 7] == bound[:, 20]).all()


def test_a_byte_of_scale_is_the_smallest_that_reaches_the_highest_value() -> None:
    scales = uniform.SCALES[:0xF8]
    assert scales[1] == 2.0**-24
    assert (np.diff(scales) > 0).all()
    highest = np.abs(SOURCE.standard_normal(1000) * 10).astype(np.float32)
    stored = uniform.scales_above("F16", highest)
    assert (scales[stored] * 127 >= highest * (1 - 2.0**-23)).all()
    assert (scales[stored - 1] * 127 < highest).all()


def every_product() -> tuple[Array, dict[str, Array]]:
    """Codes [1, 256, 1, 2048], all of them, and scales [1, 1, 1, 2048] of each element type."""
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).view(np.int8)[:, None], (256, 2048))
    bytes_, bits = np.arange(2048) % 0xF8, np.arange(2048) * 15 % 0x7C00
    scales = {"F16": uniform.scale_values(bytes_.astype(np.uint8))}
    scales["BF16"] = scales["F32"] = uniform.scale_values(bits.astype(np.uint16))
    return np.ascontiguousarray(codes).reshape(1, 256, 1, 2048), {
        dtype: scale.reshape(1, 1, 1, 2048) for dtype, scale in scales.items()
    }


def products(dtype: str) -> Array:
    codes, scales = every_product()
    out = np.empty((1, 256, 2048), np.uint32 if dtype == "F32" else np.uint16)
    uniform.write_products(dtype, codes, scales[dtype], out)
    return out


def test_products_of_halves_are_what_numpy_rounds_them_to() -> None:
    codes, scales = every_product()
    exact = codes * scales["F16"].astype(np.float64)
    halves = products("F16").view(np.float16).reshape(exact.shape)
    assert (halves.astype(np.float64) == exact).all()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_torch_gives_the_same_bits(dtype: str) -> None:
    import torch

    from kvsnap.formats.codecs import on_device

    codes, scales = every_product()
    on_cpu = [on_device.carried(values, "cpu") for values in (codes, scales[dtype])]
    found = on_device.products(*on_cpu, dtype)
    as_ints = found.view(torch.int32 if dtype == "F32" else torch.int16).numpy()
    expected = products(dtype).reshape(codes.shape)
    zero = codes == 0  # the product of a negative code and a zero scale is -0 in both
    assert (as_ints.view(expected.dtype)[~zero] == expected[~zero]).all()
    assert (as_ints[zero] == 0).all()


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [1, 1e-3, 1e-6])
def test_a_thread_that_flushes_subnormals_gets_the_same_bits(codec: str, size: float) -> None:
    import torch

    at, rows = stretch(), rows_of(values=VALUES * size)
    stored = get_codec(codec).encode(at, rows)
    expected = decode(codec, at, stored, rows)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        assert (decode(codec, at, stored, rows) == expected).all()
        again = get_codec(codec).encode(at, rows)
    finally:
        torch.set_flush_denormal(False)
    assert {k: bytes(t.data) for k, t in again.items()} == {
        k: bytes(t.data) for k, t in stored.items()
    }


@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_numba_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [products(dtype) for dtype in ("F16", "BF16", "F32")]
    monkeypatch.setattr(compiled, "_allowed", True)
    compiled.kernels.cache_clear()
    try:
        assert compiled.kernels() is not None
        for dtype, expected in zip(("F16", "BF16", "F32"), plain, strict=True):
            assert (products(dtype) == expected).all()
    finally:
        compiled.kernels.cache_clear()


def test_decoding_imports_neither_torch_nor_numba() -> None:
    script = (
        "import sys, numpy as np\n"
        "from kvsnap.formats.codecs import Stretch, get_codec\n"
        "from kvsnap.formats.layout import Plane\n"
        "at = Stretch('a.k', Plane(name='k', kind='elements', dtype='F16', row=(1, 4)), 0)\n"
        "rows = np.ones((1, 9, 4), np.uint16)\n"
        f"for codec in map(get_codec, {LOSSY}):\n"
        "    codec.decode(at, codec.encode(at, rows), rows)\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
