"""States that kvsnap does not take: each is refused by name, none is half read."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.interchange.llamacpp import order_of, parse_sequence, parse_state

State = Callable[..., bytes]


def refusal(data: bytes, version: int = 3) -> KvsnapError:
    with pytest.raises(KvsnapError) as caught:
        parse_state(memoryview(data), version)
    assert type(caught.value) in (Damaged, Unsupported)
    assert "\n" not in caught.value.what
    return caught.value


@pytest.mark.parametrize("version", [3, 4])
def test_the_state_that_the_others_bend_is_accepted(state: State, version: int) -> None:
    found = parse_state(memoryview(state(version=version)), version)
    assert found.positions.tolist() == [0, 1, 2]
    assert [rows.shape for rows in (*found.k, *found.v)] == [(3, 4)] * 2 + [(3, 2)] * 2


@pytest.mark.parametrize("version", [0, 1, 2, 5, 99, -1])
def test_an_unknown_version_is_refused_by_number(state: State, version: int) -> None:
    error = refusal(state(), version)
    assert type(error) is Unsupported
    assert error.what == (f"llama.cpp sequence state version {version} is not known (known: 3, 4)")
    assert error.hint
    with pytest.raises(Unsupported, match="is not known"):
        parse_sequence(memoryview(state()[8:]), version)


@pytest.mark.parametrize("magic", [0, 0x67677371, 0x6767736E, 0xAF143CD9])
def test_another_magic_is_damaged(state: State, magic: int) -> None:
    error = refusal(struct.pack("<I", magic) + state()[4:])
    assert type(error) is Damaged
    assert error.what.endswith(f"not {magic:#x}")


@pytest.mark.parametrize(("words", "version"), [(2, 3), (2, 4), (3, 4), (3, 3)])
@pytest.mark.parametrize("n_seq", [0, 1])
@pytest.mark.parametrize("cells", [1, 2, 7])
def test_cells_with_an_extension_are_refused_by_name(
    state: State, words: int, version: int, n_seq: int, cells: int
) -> None:
    data = state(cells=cells, extension=words, version=version, n_seq=n_seq)
    error = refusal(data, version)
    assert type(error) is Unsupported
    assert "M-RoPE or n-gram" in error.what


def test_several_used_streams_are_refused_by_name(state: State) -> None:
    for streams in ((1, 1), (1, 0, 1), (0, 1, 1)):
        error = refusal(state(streams=streams))
        assert type(error) is Unsupported
        assert "several streams" in error.what


@pytest.mark.parametrize("used", [0, 1, 2])
def test_one_used_stream_of_several_is_accepted(state: State, used: int) -> None:
    streams = [int(n == used) for n in range(3)]
    found = parse_state(memoryview(state(streams=streams)), 3)
    assert found.type.n_stream == 3
    assert len(found.positions) == 3


@pytest.mark.parametrize("count", [0, 257, 2**31, 2**32 - 1])
def test_an_impossible_number_of_streams_is_damaged(state: State, count: int) -> None:
    data = bytearray(state())
    data[8:12] = struct.pack("<I", count)
    error = refusal(bytes(data))
    assert error.what == f"a state of {count} streams"


def test_a_second_state_behind_the_first_is_refused_by_name(state: State) -> None:
    # Sliding-window and recurrent models write one after the other.
    error = refusal(state(last=state()[8:]))
    assert type(error) is Unsupported
    assert f"{len(state()) - 8} bytes follow the attention state" in error.what


@pytest.mark.parametrize("more", [b"\0", bytes(4), bytes(64)])
def test_bytes_left_over_are_refused(state: State, more: bytes) -> None:
    assert f"{len(more)} bytes follow" in refusal(state(last=more)).what


@pytest.mark.parametrize(("number", "width"), [(2, 18), (2, 36), (8, 34), (20, 18)])
def test_quantized_and_transposed_v_is_refused_by_name(
    state: State, number: int, width: int
) -> None:
    error = refusal(state(v_trans=1, v=(number, width)))
    assert type(error) is Unsupported
    assert "transposed V of type" in error.what


def test_transposed_v_of_no_columns_is_refused(state: State) -> None:
    assert type(refusal(state(v_trans=1, v=(1, 0)))) is Unsupported


def test_transposed_v_of_another_element_size_is_refused(state: State) -> None:
    data = bytearray(state(v_trans=1, layers=1))
    at = data.rindex(struct.pack("<iII", 1, 2, 2))
    data[at : at + 12] = struct.pack("<iII", 1, 4, 1)  # as many bytes, read as f32
    assert "4-byte elements" in refusal(bytes(data)).what


@pytest.mark.parametrize("number", [-1, 4, 10, 14, 31, 2**31 - 1])
def test_an_unknown_ggml_type_is_refused_by_number(state: State, number: int) -> None:
    for part in ("k", "v"):
        error = refusal(state(**{part: (number, 8)}))
        assert type(error) is Unsupported
        assert error.what == f"K or V of ggml type {number} is not known to kvsnap"


@pytest.mark.parametrize(("number", "width"), [(1, 7), (0, 6), (8, 33), (2, 20), (1, 0)])
def test_rows_of_a_broken_number_of_elements_are_damaged(
    state: State, number: int, width: int
) -> None:
    error = refusal(state(k=(number, width)))
    assert type(error) is Damaged
    assert f"rows of {width} bytes" in error.what


@pytest.mark.parametrize("n_seq", [2, 3, 2**31, 2**32 - 1])
def test_a_cell_that_sequences_share_is_refused(state: State, n_seq: int) -> None:
    data = bytearray(state())
    data[20:24] = struct.pack("<I", n_seq)
    error = refusal(bytes(data))
    assert f"{n_seq} sequences share" in error.what


def test_cells_that_differ_in_their_sequences_are_damaged(state: State) -> None:
    data = bytearray(state(cells=2))
    data[32:36] = struct.pack("<I", 0)
    assert "differ in their number" in refusal(bytes(data)).what


@pytest.mark.parametrize(("v_trans", "layers"), [(2, 2), (2**32 - 1, 2), (0, 0), (0, 4097)])
def test_impossible_flags_and_layer_counts_are_damaged(
    state: State, v_trans: int, layers: int
) -> None:
    data = bytearray(state(layers=2))
    at = 16 + 12 * 3
    data[at : at + 8] = struct.pack("<II", v_trans, layers)
    assert f"v_trans {v_trans} and {layers} layers" in refusal(bytes(data)).what


def test_a_state_without_v_is_refused_by_name(state: State) -> None:
    whole = state(layers=1)
    without_v = whole[: -(12 + 4 * 3)]
    assert "latent attention" in refusal(without_v).what


@pytest.mark.parametrize("claim", [2**16, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_claimed_number_of_cells_takes_no_memory(state: State, claim: int) -> None:
    data = bytearray(state())
    data[12:16] = struct.pack("<I", claim)
    assert type(refusal(bytes(data))) is Damaged


@pytest.mark.parametrize("claim", [2**31, 2**32, 2**62, 2**63, 2**64 - 2])
def test_a_claimed_width_of_rows_takes_no_memory(state: State, claim: int) -> None:
    data = bytearray(state(layers=1))
    at = data.index(struct.pack("<iQ", 1, 8))
    data[at + 4 : at + 12] = struct.pack("<Q", claim)
    assert type(refusal(bytes(data))) is Damaged


def test_an_empty_sequence_has_no_rows(state: State) -> None:
    found = parse_state(memoryview(state(streams=(0, 0))), 3)
    assert (len(found.positions), found.k, found.v, found.type.n_stream) == (0, (), (), 2)


@pytest.mark.parametrize(
    ("positions", "start", "stop", "order"),
    [
        ([0, 1, 2], 0, 3, None),
        ([5, 6], 5, 7, None),
        ([2, 0, 1], 0, 3, [1, 2, 0]),
        ([], 0, 0, None),
    ],
)
def test_cells_are_brought_into_the_order_of_their_positions(
    positions: list[int], start: int, stop: int, order: list[int] | None
) -> None:
    found = order_of(np.array(positions, np.int64), start, stop)
    assert (found if found is None else found.tolist()) == order


@pytest.mark.parametrize(
    "positions",
    [[], [0, 1], [0, 1, 2, 3], [0, 1, 1], [1, 2, 3], [0, 2, 1, 1], [-1, 0, 1], [0, 0, 2]],
)
def test_positions_that_are_not_each_there_once_are_damaged(positions: list[Any]) -> None:
    # A shifted or doubled position restores without an error in llama.cpp, and writes other text.
    with pytest.raises(Damaged, match=rf"{len(positions)} cells are not positions 0\.\.2"):
        order_of(np.array(positions, np.int64), 0, 3)
