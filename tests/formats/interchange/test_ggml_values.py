"""Values of ggml's types, against the `gguf` package's own decoder; and the rotation, undone."""

from __future__ import annotations

import numpy as np
import pytest

from kvsnap.formats.interchange.ggml import ggml_type_named
from kvsnap.formats.interchange.ggml_values import unrotated, values

gguf = pytest.importorskip("gguf")
QUANTIZED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_rows_have_the_values_that_ggml_gives_them(name: str) -> None:
    random = np.random.default_rng(1)
    kind = ggml_type_named(name)
    rows = random.integers(0, 256, (3, 5, 4 * kind.bytes), np.uint8)
    rows.reshape(3, 5, 4, kind.bytes)[..., 1] &= 0x3B  # no infinite scale
    if name in ("q4_1", "q5_1"):
        rows.reshape(3, 5, 4, kind.bytes)[..., 3] &= 0x3B
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(values(rows, name), expected)


@pytest.mark.parametrize(("name", "dtype"), [("f32", np.float32), ("f16", np.float16)])
def test_plain_rows_have_their_own_values_whatever_their_strides(name: str, dtype: type) -> None:
    wanted = np.random.default_rng(2).normal(size=(4, 6, 8)).astype(dtype)
    whole = wanted.view(f"<u{wanted.itemsize}")
    np.testing.assert_array_equal(values(whole, name), wanted.astype(np.float32))
    np.testing.assert_array_equal(values(whole[:, ::2], name), wanted[:, ::2].astype(np.float32))


def test_bf16_is_the_upper_half_of_f32() -> None:
    rows = np.array([[0x3F80, 0xC000, 0x7F80]], np.uint16)
    np.testing.assert_array_equal(values(rows, "bf16"), [[1.0, -2.0, np.inf]])


@pytest.mark.parametrize("size", [64, 128])
def test_a_rotation_is_its_own_inverse(size: int) -> None:
    rows = np.random.default_rng(3).normal(size=(7, 256)).astype(np.float32)
    turned = unrotated(rows, size)
    assert np.abs(turned - rows).max() > 0.5
    np.testing.assert_allclose(unrotated(turned, size), rows, atol=1e-5)
    assert unrotated(rows, 0) is rows
