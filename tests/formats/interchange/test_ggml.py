"""ggml's types: sizes as in ggml.h, and names that people type."""

from __future__ import annotations

import pytest

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.ggml import GGML_TYPES, ggml_type, ggml_type_named

# number, elements a block, bytes a block: enum ggml_type and the block structs of ggml-common.h
SIZES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "bf16": (30, 1, 2),
    "q4_0": (2, 32, 18),  # f16 scale, 16 bytes
    "q4_1": (3, 32, 20),  # f16 scale and minimum, 16 bytes
    "q5_0": (6, 32, 22),  # f16 scale, 4 bytes of high bits, 16 bytes
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),  # f16 scale, 32 bytes
    "iq4_nl": (20, 32, 18),
}


def test_sizes_are_those_of_ggml() -> None:
    assert {t.name: (t.number, t.block, t.bytes) for t in GGML_TYPES.values()} == SIZES


@pytest.mark.parametrize("name", SIZES)
def test_a_type_is_found_by_number_and_by_name_in_any_case(name: str) -> None:
    kind = ggml_type(SIZES[name][0])
    assert kind.name == name
    assert ggml_type_named(name) is ggml_type_named(name.upper()) is kind


def test_only_plain_elements_have_a_dtype() -> None:
    dtypes = {t.name: t.dtype for t in GGML_TYPES.values() if not t.quantized}
    assert dtypes == {"f32": "F32", "f16": "F16", "bf16": "BF16"}
    assert not any(t.dtype for t in GGML_TYPES.values() if t.quantized)


def test_a_row_is_a_whole_number_of_blocks() -> None:
    assert ggml_type_named("q8_0").row_bytes(128) == 136
    assert ggml_type_named("q4_0").row_bytes(128) == 72
    assert ggml_type_named("f16").row_bytes(3) == 6
    with pytest.raises(Unsupported, match="48 elements is no multiple of q8_0"):
        ggml_type_named("q8_0").row_bytes(48)


@pytest.mark.parametrize("number", [-1, 4, 5, 9, 31, 2**31])
def test_an_unknown_number_is_refused(number: int) -> None:
    with pytest.raises(Unsupported, match=f"ggml type {number} is not known"):
        ggml_type(number)


def test_an_unknown_name_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(Unsupported, match="'q9_9'") as caught:
        ggml_type_named("q9_9")
    assert all(name in caught.value.hint for name in SIZES)
