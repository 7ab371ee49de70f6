"""quant.cpp's files: the one kind that holds all rows, and the others with the reason why not."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, HALVES, ForeignRows, Given
from kvsnap.formats.interchange.quantcpp import QUANTCPP
from kvsnap.formats.names import token_array
from tests.formats.interchange.sample_rows import EXPECTED, SAMPLES, one_file, stored_digest

F32, BROKEN = "quantcpp_f32.kv", "quantcpp_4bit_broken.kv"


def read(data: bytes | memoryview, **given: object) -> ForeignRows:
    return QUANTCPP.read({"x": memoryview(data)}, Given(**given))  # type: ignore[arg-type]


def write(rows: ForeignRows, **given: object) -> bytes:
    assert QUANTCPP.write is not None
    (data,) = QUANTCPP.write(rows, Given(**given)).values()  # type: ignore[arg-type]
    return data


def built(
    *, version: int = 1, layers: int = 2, width: int = 4, max_seq: int = 8, tokens: int = 3,
    kv_type: int = 13, v_fp16: int = 0, rest: bytes = b"", size: int | None = None,
) -> bytes:  # fmt: skip
    fields = (version, layers, width, max_seq, tokens, kv_type, v_fp16)
    rows = bytes(2 * 3 * 4 * 8 if size is None else size)
    return struct.pack("<4s7I32s", b"QKVC", *fields, rest) + rows


def test_every_value_is_the_one_the_tool_held() -> None:
    expected, rows = EXPECTED[F32], QUANTCPP.read(one_file(F32), Given())
    assert stored_digest(rows) == expected["rows_as_stored_f32_sha256"]
    assert (len(rows.k), rows.tokens, rows.k[0].shape[1]) == (4, 20, 128)
    assert (rows.k_type, rows.v_type, rows.order, rows.rotation) == ("f32", "f32", GGUF, (0, 0))
    assert rows.token_ids is None
    assert rows.told == {"version": "1", "max_seq": "2048"}


def test_the_tools_own_file_is_written_again_to_the_byte() -> None:
    assert write(QUANTCPP.read(one_file(F32), Given())) == one_file(F32)[F32]


def test_more_tokens_than_the_usual_context_raise_it() -> None:
    area = np.arange(2049 * 2, dtype=np.uint32).reshape(2049, 2)
    rows = replace(QUANTCPP.read(one_file(F32), Given()), k=(area,), v=(area + 1,))
    again = read(write(rows))
    assert again.told["max_seq"] == "2049"
    assert np.array_equal(again.k[0], area)
    assert np.array_equal(again.v[0], area + 1)


def test_the_quantized_file_is_refused_because_v_is_not_in_it() -> None:
    with pytest.raises(Unsupported, match="type 5 holds no V") as caught:
        QUANTCPP.read(one_file(BROKEN), Given())
    assert "kv_compress=0" in caught.value.hint


@pytest.mark.parametrize("kv_type", range(13))
def test_every_quantized_type_is_refused_whatever_the_size(kv_type: int) -> None:
    for v_fp16, why in ((0, "no V, and K in part"), (1, "holds K in part")):
        for size in (0, 2 * 3 * 4 * 4, 2 * 3 * 4 * 6, 2 * 3 * 4 * 8):
            with pytest.raises(Unsupported, match=why):
                read(built(kv_type=kv_type, v_fp16=v_fp16, size=size))


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"version": 0}, Unsupported, "version 0"),
        ({"version": 9}, Unsupported, "version 9"),
        ({"kv_type": 14}, Unsupported, "kv_type 14"),
        ({"v_fp16": 1}, Unsupported, "v_fp16 1"),
        ({"layers": 0}, Damaged, "0 layers"),
        ({"width": 0}, Damaged, "rows of 0"),
        ({"tokens": 0}, Damaged, "0 of 8 tokens"),
        ({"tokens": 9}, Damaged, "9 of 8 tokens"),
        ({"rest": b"\0" * 31 + b"x"}, Damaged, "of 8 tokens"),
        ({"layers": 2**32 - 1}, Damaged, "head says"),
        ({"width": 2**32 - 1}, Damaged, "head says"),
        ({"size": 191}, Damaged, "head says 256"),
        ({"size": 193}, Damaged, "head says 256"),
        ({"size": 0}, Damaged, "head says 256"),
    ],
)
def test_heads_that_do_not_go_with_the_file_are_refused(
    change: dict[str, int], error: type[KvsnapError], why: str
) -> None:
    assert read(built()).tokens == 3
    with pytest.raises(error, match=why):
        read(built(**change))  # type: ignore[arg-type]


def test_the_file_cut_anywhere_is_refused() -> None:
    data = one_file(F32)[F32]
    for length in [*range(1200), *range(1200, len(data), 97), len(data) - 1]:
        with pytest.raises(Damaged):
            read(data[:length])
    with pytest.raises(Damaged):
        read(bytes(data) + b"\0")


def test_every_bit_of_the_head_counts() -> None:
    data, accepted = bytes(one_file(F32)[F32]), []
    for bit in range(64 * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            read(changed)
        except (Damaged, Unsupported):
            continue
        accepted.append(bit // 8)
    assert set(accepted) == {16, 17, 18, 19}  # max_seq: any that is not below the tokens will do


@for_all(st.binary(max_size=100), st.booleans())
def test_garbage_is_refused_and_recognising_never_fails(tail: bytes, headed: bool) -> None:
    data = (b"QKVC\1\0\0\0" if headed else b"") + tail
    assert QUANTCPP.recognise({"x": memoryview(data)}) == data.startswith(b"QKVC")
    with pytest.raises((Damaged, Unsupported)):
        read(data)


def test_its_own_files_alone_are_recognised() -> None:
    files = [name for name in EXPECTED if (SAMPLES / name).is_file()]
    recognised = {name for name in files if QUANTCPP.recognise(one_file(name))}
    assert recognised == {F32, BROKEN}
    assert not QUANTCPP.recognise({})


def test_the_form_without_a_head_is_not_recognised() -> None:
    headless = struct.pack("<iQ", 3, 4) + bytes(2 * 3 * 4 * 8)
    assert not QUANTCPP.recognise({"x": memoryview(headless)})
    with pytest.raises(Damaged, match="starts with"):
        read(headless)


def test_token_ids_are_those_given_and_as_many_as_rows() -> None:
    found = read(built(), token_ids=token_array([7, 8, 9])).token_ids
    assert found is not None
    assert found.tolist() == [7, 8, 9]
    for bad in ([7, 8], [7, 8, 9, 10]):
        with pytest.raises(UsageError, match="rows of 3 tokens"):
            read(built(), token_ids=token_array(bad))


def test_rows_that_the_tool_cannot_hold_are_refused() -> None:
    rows = read(built())
    assert write(rows)
    narrow = tuple(area[:, :2] for area in rows.v)
    for bad, why in (
        (replace(rows, order=HALVES), "order halves"),
        (replace(rows, k_type="f16"), "plain f32"),
        (replace(rows, v_type="bf16"), "plain f32"),
        (replace(rows, rotation=(64, 64)), "plain f32"),
        (replace(rows, rotation=None), "plain f32"),
        (replace(rows, k=(), v=()), "no rows"),
        (replace(rows, v=rows.v[:1]), "equal size"),
        (replace(rows, v=narrow), "equal size"),
        (replace(rows, v=tuple(area.astype(np.uint16) for area in rows.v)), "equal size"),
    ):
        with pytest.raises(UsageError, match=why):
            write(bad)
    with pytest.raises(Unsupported, match="version 2 cannot"):
        write(rows, version=2)
