"""Generated llama.cpp states: parse, bring into order, parse again."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.llamacpp import (
    State,
    order_of,
    parse_sequence,
    parse_state,
)
from kvsnap.formats.interchange.llamacpp_memory import KvCells, assemble_memory

MAGIC = 0xAF143CD8
ITEM_BYTES = {0: 4, 1: 2, 30: 2, 8: 34, 2: 18}  # f32, f16, bf16, and blocks of q8_0 and q4_0


@dataclass(frozen=True)
class Written:
    """A state as bytes, and what was written into it: rows by position, as bytes."""

    data: bytes
    version: int
    v_trans: bool
    widths: list[tuple[int, int, int, int]]
    """Per layer: K's type and bytes a row, V's type and bytes a row."""
    k: list[list[bytes]]
    v: list[list[bytes]]
    cells: int
    n_stream: int
    rotation: tuple[int, int]


@st.composite
def states(draw: st.DrawFn) -> Written:
    version, v_trans = draw(st.sampled_from([3, 4])), draw(st.booleans())
    cells, n_seq = draw(st.integers(1, 5)), draw(st.integers(0, 1))
    n_stream = draw(st.integers(1, 3))
    used, order = draw(st.integers(0, n_stream - 1)), draw(st.permutations(range(cells)))
    rotation = draw(st.sampled_from([(0, 0), (64, 64), (128, 64)])) if version == 4 else (0, 0)
    layers = draw(st.integers(1, 3))
    v_types = [0, 1, 30] if v_trans else list(ITEM_BYTES)
    one = st.tuples(
        st.sampled_from(list(ITEM_BYTES)), st.integers(1, 4), st.sampled_from(v_types),
        st.integers(1, 4),
    )  # fmt: skip
    # Most models have equal layers; some have wider ones in between.
    drawn = draw(st.lists(one, min_size=layers, max_size=layers) | one.map(lambda x: [x] * layers))
    widths = [(kt, kn * ITEM_BYTES[kt], vt, vn * ITEM_BYTES[vt]) for kt, kn, vt, vn in drawn]
    source = np.random.default_rng(draw(st.integers(0, 2**32)))
    k = [[source.bytes(kw) for _ in range(cells)] for _, kw, _, _ in widths]
    v = [[source.bytes(vw) for _ in range(cells)] for _, _, _, vw in widths]

    stream = [struct.pack("<I", cells)]
    stream += [struct.pack("<iI", at, n_seq) + bytes(4 * n_seq) for at in order]
    stream.append(struct.pack("<II", v_trans, layers))
    if version == 4:
        stream.append(struct.pack("<II", *rotation))
    for (number, width, _, _), rows in zip(widths, k, strict=True):
        stream.append(struct.pack("<iQ", number, width))
        stream += [rows[at] for at in order]
    for (_, _, number, width), rows in zip(widths, v, strict=True):
        item = ITEM_BYTES[number]
        if v_trans:
            stream.append(struct.pack("<iII", number, item, width // item))
            stream += [rows[at][e : e + item] for e in range(0, width, item) for at in order]
        else:
            stream.append(struct.pack("<iQ", number, width))
            stream += [rows[at] for at in order]
    streams = [b"".join(stream) if n == used else bytes(4) for n in range(n_stream)]
    data = struct.pack("<IiI", MAGIC, 0, n_stream) + b"".join(streams)
    return Written(data, version, v_trans, widths, k, v, cells, n_stream, rotation)


def by_position(state: State, cells: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    order = order_of(state.positions, 0, cells)
    index = slice(None) if order is None else order
    return [rows[index] for rows in state.k], [rows[index] for rows in state.v]


def as_bytes(layers: list[np.ndarray]) -> list[list[bytes]]:
    return [[row.tobytes() for row in rows] for rows in layers]


@given(written=states())
def test_rows_by_position_are_the_ones_that_were_written(written: Written) -> None:
    state = parse_state(memoryview(written.data), written.version)
    k, v = by_position(state, written.cells)
    assert as_bytes(k) == written.k
    assert as_bytes(v) == written.v
    kind = state.type
    found = [(t.k.number, t.k_bytes, t.v.number, t.v_bytes) for t in kind.layers]
    assert found == written.widths
    assert (kind.v_trans, kind.n_stream) == (written.v_trans, written.n_stream)
    assert (kind.rotation_k, kind.rotation_v) == written.rotation


@given(written=states())
def test_an_assembled_state_parses_to_the_same_rows_in_order(written: Written) -> None:
    state = parse_state(memoryview(written.data), written.version)
    k, v = by_position(state, written.cells)
    tokens = written.cells
    built = assemble_memory([state.type], [KvCells(tokens)], tokens)
    for target, source in zip(sum(built.parts[0], ()), (*k, *v), strict=True):
        target[...] = source
    again = parse_state(built.buffer.data, written.version)
    assert again.type == state.type
    assert order_of(again.positions, 0, written.cells) is None
    assert as_bytes(list(again.k)) == written.k
    assert as_bytes(list(again.v)) == written.v


@given(written=states(), tokens=st.integers(0, 9))
def test_an_assembly_is_exactly_as_long_as_its_state(written: Written, tokens: int) -> None:
    # llama.cpp aborts the process on one byte less.
    kind = parse_state(memoryview(written.data), written.version).type
    buffer = assemble_memory([kind], [KvCells(tokens)], tokens).buffer
    buffer_end = parse_state(buffer.data, written.version)
    assert len(buffer_end.positions) == tokens


@given(written=states(), more=st.binary(min_size=1, max_size=40))
def test_cut_or_lengthened_states_are_never_read(written: Written, more: bytes) -> None:
    for length in range(len(written.data)):
        with pytest.raises((Damaged, Unsupported)):
            parse_state(memoryview(written.data)[:length], written.version)
    with pytest.raises((Damaged, Unsupported)):
        parse_state(memoryview(written.data + more), written.version)


def read_or_refuse(data: bytes, version: int) -> None:
    """Nothing but our own errors comes out, and what is read lies inside the buffer."""
    try:
        state = parse_sequence(memoryview(data), version)
    except (Damaged, Unsupported):
        return
    cells = len(state.positions)
    assert all(len(rows) == cells for rows in (*state.k, *state.v))
    assert sum(rows.nbytes for rows in (*state.k, *state.v)) <= len(data)


@given(data=st.binary(max_size=200), version=st.sampled_from([3, 4]))
@example(data=bytes(4), version=3)
@example(data=b"\1\0\0\0" + b"\xff" * 100, version=3)
def test_random_bytes_are_read_or_refused(data: bytes, version: int) -> None:
    read_or_refuse(data, version)


@given(
    written=states(),
    at=st.integers(0, 10**6),
    word=st.sampled_from([0, 1, 2, 3, 2**15, 2**31 - 1, 2**31, 2**32 - 1]),
    size=st.sampled_from([1, 4]),
)
def test_states_with_one_field_changed_are_read_or_refused(
    written: Written, at: int, word: int, size: int
) -> None:
    data = bytearray(written.data[8:])
    start = at % len(data) // size * size  # words lie on their own size, mostly
    data[start : start + size] = word.to_bytes(4, "little")[:size]
    read_or_refuse(bytes(data), written.version)
