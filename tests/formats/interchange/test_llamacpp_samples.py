"""State files that llama.cpp itself wrote: read to the value, and written back to the byte."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import KvsnapError, Unsupported
from kvsnap.formats.interchange.llamacpp import (
    STATE_MAGIC,
    State,
    StateType,
    order_of,
    parse_sequence,
    parse_state,
)
from kvsnap.formats.interchange.llamacpp_memory import KvCells, assemble_memory

Sample = Any
Read = Callable[[str], Sample]
SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
EXPECTED: dict[str, dict[str, Any]] = json.loads((SAMPLES / "expected.json").read_text("utf-8"))[
    "files"
]
READABLE = [name for name in EXPECTED if "_v3_" in name or "_v4_" in name]
WITH_VALUES = [name for name in READABLE if "rows_as_stored_f32_sha256" in EXPECTED[name]]


def as_f32(rows: np.ndarray, kv_type: str) -> np.ndarray:
    """Values of one layer's rows [cells, row], written without kvsnap's help."""
    if kv_type == "f32":
        return rows.view("<f4")
    if kv_type == "f16":
        return rows.view("<f2").astype("<f4")
    if kv_type == "bf16":
        return (rows.astype("<u4") << 16).view("<f4")
    assert kv_type == "q8_0"
    blocks = rows.reshape(len(rows), -1, 34)
    scale = blocks[:, :, :2].copy().view("<f2").astype("<f4")
    return (scale * blocks[:, :, 2:].view(np.int8).astype("<f4")).reshape(len(rows), -1)


@pytest.mark.parametrize("name", list(EXPECTED))
def test_the_sample_is_the_one_that_was_recorded(name: str) -> None:
    data = (SAMPLES / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == EXPECTED[name]["sha256"]


@pytest.mark.parametrize("name", READABLE)
def test_shape_and_types_are_read(name: str, sample: Read) -> None:
    read = sample(name)
    expected, found = read.expected, parse_sequence(read.state, read.version)
    kind = found.type
    assert len(kind.layers) == expected["n_layers"]
    assert {(layer.k.name, layer.v.name) for layer in kind.layers} == {(expected["kv_type"],) * 2}
    assert kind.v_trans == bool(expected["v_trans"])
    assert kind.n_stream == expected.get("n_stream", 1)
    assert [kind.rotation_k, kind.rotation_v] == (expected.get("n_rot") or [0, 0])
    assert found.positions.tolist() == list(range(expected["n_rows"]))
    assert read.token_ids == expected["token_ids_in_file"]
    assert order_of(found.positions, 0, len(read.token_ids)) is None


@pytest.mark.parametrize("name", WITH_VALUES)
def test_every_value_is_the_one_the_engine_held(name: str, sample: Read) -> None:
    read = sample(name)
    found = parse_sequence(read.state, read.version)
    digest = hashlib.sha256()
    for k, v in zip(found.k, found.v, strict=True):  # [layer][K, V][row][head][dim]
        for rows in (k, v):
            digest.update(np.ascontiguousarray(as_f32(rows.copy(), read.expected["kv_type"])))
    assert digest.hexdigest() == read.expected["rows_as_stored_f32_sha256"]


def test_a_q4_0_row_is_read_as_the_bytes_that_were_stored(sample: Read) -> None:
    read = sample("llama_cpp_seq_v3_q4_0_vt0.ggsq")
    found = parse_sequence(read.state, read.version)
    assert {rows.shape for rows in (*found.k, *found.v)} == {(40, 72)}
    assert found.k[0][0, :18].tobytes().hex() == "7d3c94ae94ba799829a6a59a98b755a097b7"


def filled(kind: StateType, rows: State, seq_id: int = 0) -> bytes:
    tokens = len(rows.positions)
    built = assemble_memory([kind], [KvCells(tokens)], tokens, seq_id)
    for target, source in zip(sum(built.parts[0], ()), (*rows.k, *rows.v), strict=True):
        target[...] = source
    return built.buffer.tobytes()


@pytest.mark.parametrize("name", [name for name in READABLE if "slot1" not in name])
def test_a_state_assembled_from_its_rows_is_the_same_bytes(name: str, sample: Read) -> None:
    read = sample(name)
    found = parse_sequence(read.state, read.version)
    head = struct.pack("<Ii", STATE_MAGIC, 0)
    built = filled(found.type, found)
    assert built == head + bytes(read.state)
    again = parse_state(memoryview(built), read.version)
    assert again.type == found.type


def test_a_sequence_of_stream_1_is_assembled_into_stream_0(sample: Read) -> None:
    # llama.cpp puts the cells where the sequence that it restores lives; the bytes only move.
    read = sample("llama_server_slot_v4_f16_np2_slot1.bin")
    found = parse_sequence(read.state, read.version)
    cells_and_rows = bytes(read.state[8:])  # after n_stream 2 and an empty stream 0
    assert bytes(read.state[:8]) == struct.pack("<II", 2, 0)
    built = filled(found.type, found, seq_id=1)  # slot 1 of the server that wrote it
    moved = struct.pack("<IiI", STATE_MAGIC, 1, 2) + cells_and_rows + bytes(4)
    assert built == moved


@pytest.mark.parametrize(
    ("straight", "transposed"),
    [
        ("llama_cpp_seq_v3_f16_vt0.ggsq", "llama_cpp_seq_v3_f16_vt1.ggsq"),
        ("llama_server_slot_v4_f16_np1.bin", "llama_server_slot_v4_f16_vt1_np1.bin"),
    ],
)
def test_rows_of_one_layout_of_v_make_a_state_of_the_other(
    straight: str, transposed: str, sample: Read
) -> None:
    for here, there in ((straight, transposed), (transposed, straight)):
        rows = parse_sequence(sample(here).state, sample(here).version)
        kind = parse_sequence(sample(there).state, sample(there).version).type
        turned = parse_state(memoryview(filled(kind, rows)), kind.version)
        assert turned.type == kind
        for mine, original in zip((*turned.k, *turned.v), (*rows.k, *rows.v), strict=True):
            assert np.array_equal(mine, original)
        assert len(filled(kind, rows)) == len(sample(there).state) + 8


@pytest.mark.parametrize(
    "name",
    [
        "llama_cpp_2025_seq_v2_f16_vt0.ggsq",
        "constructed_llama_seq_v2_with_n_stream_f16_vt0.ggsq",
    ],
)
def test_version_2_names_two_layouts_and_is_refused(name: str, sample: Read) -> None:
    read = sample(name)
    assert read.version == 2
    with pytest.raises(Unsupported, match="version 2 is not known"):
        parse_sequence(read.state, read.version)


def test_the_2025_layout_is_not_taken_for_another_version(sample: Read) -> None:
    # Without the n_stream word its cell count stands there: 40 streams, of 0, 0, 1 … cells.
    read = sample("llama_cpp_2025_seq_v2_f16_vt0.ggsq")
    for version in (3, 4):
        with pytest.raises(KvsnapError):
            parse_sequence(read.state, version)


def test_a_whole_context_file_is_not_a_sequence_state() -> None:
    data = (SAMPLES / "llama_cpp_session_v10_f16_vt0.ggsn").read_bytes()
    _, version, count = struct.unpack_from("<III", data)
    after_ids = memoryview(data)[12 + 4 * count :]
    with pytest.raises(Unsupported, match="version 10 is not known"):
        parse_sequence(after_ids, version)
    for known in (3, 4):  # an architecture's name stands where n_stream belongs
        with pytest.raises(KvsnapError):
            parse_sequence(after_ids, known)
