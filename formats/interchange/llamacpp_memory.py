"""States of llama.cpp memories with several parts: sliding windows, recurrent layers, hybrids.

After the head of every state the parts follow one another, with no head of their own
(src/llama-kv-cache-iswa.cpp, llama-memory-hybrid.cpp, llama-memory-hybrid-iswa.cpp, `state_write`):

    [KV of the layers with full attention] [KV of those with a sliding window] [recurrent layers]

A KV part is as formats/interchange/llamacpp.py says. Cells that the window masks for the next token
are left out when a sequence is written, whatever is in memory. The recurrent part
(src/llama-memory-recurrent.cpp), where u32 n_layer counts all layers of the model:

    u32 cell_count (0 or 1) | i32 pos | u32 n_seq_id = 0 | u32 s_trans = 0 | u32 n_layer
    R, per recurrent layer: i32 type | u64 bytes | bytes        then S in the same way
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.llamacpp import (
    State,
    StateType,
    check_version,
    kv_size,
    read_head,
    read_kv,
    write_head,
    write_kv,
)
from kvsnap.formats.interchange.state_bytes import Reader, Writer
from kvsnap.formats.layout import Array

_COUNT = struct.Struct("<I")
_CELL = struct.Struct("<iI")
_SHAPE = struct.Struct("<II")
_ROW = struct.Struct("<iQ")
_HEAD_BYTES = 8


@dataclass(frozen=True)
class RecurrentType:
    """(ggml type, bytes) of each R and each S row; `n_layer` are all layers of the model."""

    n_layer: int
    r: tuple[tuple[int, int], ...]
    s: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Recurrent:
    """A recurrent part: bytes [layer] of R and S as views of the buffer; `position` of the last token,
    -1 where nothing was evaluated."""

    type: RecurrentType
    position: int
    r: tuple[Array, ...]
    s: tuple[Array, ...]


PartType: TypeAlias = StateType | RecurrentType
Part: TypeAlias = State | Recurrent


def parse_memory(
    buffer: memoryview, version: int, kinds: Sequence[type[State | Recurrent]]
) -> list[Part]:
    """Parse the bytes of `llama_state_seq_get_data` of a memory with these parts."""
    check_version(version)
    reader = Reader(buffer)
    read_head(reader)
    parts: list[Part] = [
        read_kv(reader, version) if kind is State else _read_recurrent(reader) for kind in kinds
    ]
    if reader.at != len(buffer):
        raise Unsupported(f"{len(buffer) - reader.at} bytes follow the parts that are known")
    return parts


def parse_caches(buffer: memoryview, version: int) -> tuple[State, ...]:
    """Parse a STATE of attention alone, without its head: one KV cache, or two where a sliding window
    has its own. Which of them it is, its length tells; other memories are refused."""
    check_version(version)
    reader = Reader(buffer)
    full = read_kv(reader, version)
    if reader.at == len(buffer):
        return (full,)
    window = read_kv(reader, version)
    if reader.at != len(buffer):
        raise Unsupported(f"{len(buffer) - reader.at} bytes follow the parts that are known")
    return full, window


@dataclass(frozen=True)
class KvCells:
    """The cells of a KV part that is to be assembled: `tokens` from position `first` on."""

    tokens: int
    first: int = 0


@dataclass(frozen=True)
class MemoryAssembly:
    """A state under construction: per part (K, V) or (R, S), as views to fill."""

    buffer: Array
    parts: tuple[tuple[tuple[Array, ...], tuple[Array, ...]], ...]


def assemble_memory(
    kinds: Sequence[PartType], cells: Sequence[KvCells], position: int, seq_id: int = 0
) -> MemoryAssembly:
    """A state that stands at `position`, its rows left for the caller to fill. `cells`: one for each
    KV part, in order.

    The buffer is exactly as long as llama.cpp will read. With several streams the rows go into
    stream 0, where sequence 0 lives.
    """
    for kind in kinds:
        if isinstance(kind, StateType):
            check_version(kind.version)
    given = iter(cells)
    plan = [(kind, next(given) if isinstance(kind, StateType) else None) for kind in kinds]
    size = _HEAD_BYTES + sum(
        kv_size(kind, own.tokens) if isinstance(kind, StateType) and own else _recurrent_size(kind)
        for kind, own in plan
    )
    writer = Writer(np.empty(size, np.uint8))
    write_head(writer, seq_id)
    parts = []
    for kind, own in plan:
        if isinstance(kind, StateType) and own is not None:
            parts.append(write_kv(writer, kind, own.tokens, seq_id, own.first))
        elif isinstance(kind, RecurrentType):
            parts.append(_write_recurrent(writer, kind, position))
    return MemoryAssembly(writer.finish(), tuple(parts))


def _recurrent_size(kind: PartType) -> int:
    assert isinstance(kind, RecurrentType)
    rows = (*kind.r, *kind.s)
    return 4 + _CELL.size + _SHAPE.size + sum(_ROW.size + size for _, size in rows)


def _write_recurrent(
    writer: Writer, kind: RecurrentType, position: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    writer.put(_COUNT, 1)
    writer.put(_CELL, position - 1, 0)
    writer.put(_SHAPE, 0, kind.n_layer)
    found = []
    for rows in (kind.r, kind.s):
        areas = []
        for number, size in rows:
            writer.put(_ROW, number, size)
            areas.append(writer.area(size))
        found.append(tuple(areas))
    return found[0], found[1]


def _read_recurrent(reader: Reader) -> Recurrent:
    """R and S are told apart by their number alone: each recurrent layer has one of both."""
    (cells,) = reader.take(_COUNT)
    if cells > 1:
        raise Unsupported(f"a recurrent state of {cells} cells is not one sequence's")
    position = -1
    if cells:
        position, ids = reader.take(_CELL)
        if ids:
            raise Damaged("the cell of a recurrent state names a sequence")
    transposed, n_layer = reader.take(_SHAPE)
    if transposed or n_layer > 4096:
        raise Unsupported(f"a recurrent state with s_trans {transposed} and {n_layer} layers")
    kinds: list[tuple[int, int]] = []
    rows: list[Array] = []
    while reader.at < len(reader.buffer):
        number, size = reader.take(_ROW)
        kinds.append((number, size))
        rows.append(np.frombuffer(reader.bytes(size if cells else 0), np.uint8))
        if len(kinds) > 2 * n_layer:
            raise Damaged("a recurrent state of more rows than its layers have")
    if len(kinds) % 2:
        raise Unsupported("a recurrent state whose layers differ in what they keep")
    half = len(kinds) // 2
    kind = RecurrentType(n_layer, tuple(kinds[:half]), tuple(kinds[half:]))
    return Recurrent(kind, position, tuple(rows[:half]), tuple(rows[half:]))
