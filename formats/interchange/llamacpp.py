"""llama.cpp's sequence state: parse it into rows by position, and assemble it from rows.

`llama_state_seq_get_data` (src/llama-kv-cache.cpp, `state_write`), all little-endian:

    u32 0xaf143cd8 | i32 seq_id
    u32 n_stream, then per stream: u32 cell_count (0: next stream), and where it is not 0
      per cell: i32 pos | u32 n_seq_id | i32 seq_id * n_seq_id
      u32 v_trans | u32 n_layer | version 4 only: u32 n_rot_k | u32 n_rot_v
      K, per layer: i32 type | u64 row_bytes | cells * row_bytes
      V, per layer: v_trans 0: i32 type | u64 row_bytes | cells * row_bytes
                    v_trans 1: i32 type | u32 element_bytes | u32 width | width * cells elements

The version is not in these bytes (`LLAMA_STATE_SEQ_VERSION` of the library tells it), nor is model,
rope, token ids, or (before version 4) whether quantized rows are Hadamard-rotated. llama.cpp aborts
the process on a short buffer, so a state is built to the exact byte or not at all.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.ggml import GgmlType, ggml_type
from kvsnap.formats.interchange.state_bytes import Reader, Writer
from kvsnap.formats.layout import Array

STATE_MAGIC = 0xAF143CD8
SUPPORTED_VERSIONS = (3, 4)
_HEAD = struct.Struct("<Ii")
_WORD = struct.Struct("<I")
_CELL = struct.Struct("<iI")
_ROWS = struct.Struct("<iQ")
_COLUMNS = struct.Struct("<iII")
_CELL_BYTES = _CELL.size + 4
_EXTENSION_WORDS = (2, 3)
"""Words that M-RoPE (x, y) or PLE n-gram (x, y, token) models put into each cell."""


@dataclass(frozen=True)
class LayerType:
    """K and V of one layer: the ggml type, and the bytes of one token's row."""

    k: GgmlType
    k_bytes: int
    v: GgmlType
    v_bytes: int


@dataclass(frozen=True)
class StateType:
    """Everything but cells and rows: what a context's states look like."""

    version: int
    v_trans: bool
    layers: tuple[LayerType, ...]
    n_stream: int = 1
    rotation_k: int = 0
    """Read from version 4, else as the caller says: older versions do not record it."""
    rotation_v: int = 0


@dataclass(frozen=True)
class State:
    """A state's rows as views of its buffer: per layer [cells, row], in the order of the cells."""

    type: StateType
    positions: np.ndarray
    k: tuple[Array, ...]
    v: tuple[Array, ...]


def check_version(version: int) -> None:
    if version not in SUPPORTED_VERSIONS:
        known = ", ".join(map(str, SUPPORTED_VERSIONS))
        raise Unsupported(
            f"llama.cpp sequence state version {version} is not known (known: {known})",
            "use a llama-cpp-python that kvsnap supports, or a newer kvsnap",
        )


def parse_state(buffer: memoryview, version: int) -> State:
    """Parse the bytes of `llama_state_seq_get_data`. Refuses by name what it does not know."""
    check_version(version)
    read_head(Reader(buffer))
    return parse_sequence(buffer[_HEAD.size :], version)


def read_head(reader: Reader) -> None:
    """What every state starts with, whatever memory it is of."""
    magic, _ = reader.take(_HEAD)
    if magic != STATE_MAGIC:
        raise Damaged(f"a llama.cpp sequence state starts with {STATE_MAGIC:#x}, not {magic:#x}")


def parse_sequence(buffer: memoryview, version: int) -> State:
    """Parse the STATE part alone, as `ggsq` files hold it after their token list."""
    check_version(version)
    try:
        return _parse(buffer, version, 0)
    except (Damaged, Unsupported) as plain:
        for words in _EXTENSION_WORDS:
            try:
                _parse(buffer, version, words)
            except (Damaged, Unsupported):
                continue
            raise Unsupported(
                "the state's cells carry extensions (M-RoPE or n-gram models)",
                "kvsnap does not handle these models yet",
            ) from plain
        raise


def order_of(positions: np.ndarray, start: int, stop: int) -> np.ndarray | None:
    """Indices that bring cells into position order; None where they are in order already.

    `Damaged` unless the positions are exactly start..stop-1, each once.
    """
    wanted = np.arange(start, stop, dtype=np.int64)
    if len(positions) == len(wanted) and np.array_equal(positions, wanted):
        return None
    order = np.argsort(positions, kind="stable")
    if len(positions) != len(wanted) or not np.array_equal(positions[order], wanted):
        raise Damaged(f"the state's {len(positions)} cells are not positions {start}..{stop - 1}")
    return order


def write_head(writer: Writer, seq_id: int) -> None:
    """What every state starts with, whatever memory it is of."""
    writer.put(_HEAD, STATE_MAGIC, seq_id)


def kv_size(kind: StateType, tokens: int) -> int:
    """Bytes of a KV cache's part of a state."""
    rows = sum(layer.k_bytes + layer.v_bytes for layer in kind.layers) * tokens
    heads = len(kind.layers) * (_ROWS.size + (_COLUMNS if kind.v_trans else _ROWS).size)
    words = 4 if kind.version >= 4 else 2
    size = 4 + 4 * kind.n_stream
    return size + ((_CELL_BYTES * tokens + 4 * words + heads + rows) if tokens else 0)


def write_kv(
    writer: Writer, kind: StateType, tokens: int, seq_id: int, first: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Write a KV cache's part but for its rows; views of K and V to fill, per layer."""
    writer.put(_WORD, kind.n_stream)
    writer.put(_WORD, tokens)
    k: list[Array] = []
    v: list[Array] = []
    if tokens:
        cells = writer.area(_CELL_BYTES * tokens).view("<i4").reshape(tokens, 3)
        cells[:, 0] = np.arange(first, first + tokens)
        cells[:, 1] = 1
        cells[:, 2] = seq_id
        writer.put(_WORD, int(kind.v_trans))
        writer.put(_WORD, len(kind.layers))
        if kind.version >= 4:
            writer.put(_WORD, kind.rotation_k)
            writer.put(_WORD, kind.rotation_v)
        for layer in kind.layers:
            writer.put(_ROWS, layer.k.number, layer.k_bytes)
            k.append(_by_token(writer.area(tokens * layer.k_bytes), tokens, layer.k, False))
        for layer in kind.layers:
            if kind.v_trans:
                writer.put(_COLUMNS, layer.v.number, layer.v.bytes, layer.v_bytes // layer.v.bytes)
            else:
                writer.put(_ROWS, layer.v.number, layer.v_bytes)
            area = writer.area(tokens * layer.v_bytes)
            v.append(_by_token(area, tokens, layer.v, kind.v_trans))
    for _ in range(kind.n_stream - 1):
        writer.put(_WORD, 0)
    return tuple(k), tuple(v)


def _by_token(area: Array, tokens: int, kind: GgmlType, transposed: bool) -> Array:
    """A view [tokens, row] of unsigned integers: bytes for quantized types, else elements."""
    view = area if kind.quantized else area.view(f"<u{kind.bytes}")
    return view.reshape(-1, tokens).T if transposed else view.reshape(tokens, -1)


def _parse(buffer: memoryview, version: int, extension_words: int) -> State:
    reader = Reader(buffer)
    state = read_kv(reader, version, extension_words)
    if len(state.positions) and not state.type.layers:
        raise Damaged(f"a state with v_trans {int(state.type.v_trans)} and 0 layers")
    if reader.at != len(buffer):
        raise Unsupported(
            f"{len(buffer) - reader.at} bytes follow the attention state"
            " (sliding-window or recurrent memory)",
            "a file that is longer than it says is not read, nor is a state of several memories",
        )
    return state


def read_kv(reader: Reader, version: int, extension_words: int = 0) -> State:
    """Read a KV cache's part of a state; of no layers, where a model has none of that kind."""
    (n_stream,) = reader.take(_WORD)
    if not 1 <= n_stream <= 256:  # LLAMA_MAX_SEQ
        raise Damaged(f"a state of {n_stream} streams")
    found: State | None = None
    for _ in range(n_stream):
        (cells,) = reader.take(_WORD)
        if cells and found:
            raise Unsupported("a state with cells in several streams is not one sequence")
        if cells:
            found = _stream(reader, version, n_stream, cells, extension_words)
    empty = StateType(version, False, (), n_stream)
    return found or State(empty, np.empty(0, np.int64), (), ())


def _stream(reader: Reader, version: int, n_stream: int, cells: int, extension_words: int) -> State:
    positions = _positions(reader, cells, extension_words)
    v_trans, n_layer = reader.take(struct.Struct("<II"))
    if v_trans > 1 or n_layer > 4096:
        raise Damaged(f"a state with v_trans {v_trans} and {n_layer} layers")
    rotation_k, rotation_v = reader.take(struct.Struct("<II")) if version >= 4 else (0, 0)
    ks = [_k_rows(reader, cells) for _ in range(n_layer)]
    if n_layer and reader.at == len(reader.buffer):
        raise Unsupported("a state without V rows (latent attention) is not handled yet")
    read_v: Callable[[Reader, int], tuple[GgmlType, int, Array]]
    read_v = _v_columns if v_trans else _k_rows
    vs = [read_v(reader, cells) for _ in range(n_layer)]
    layers = tuple(
        LayerType(k, k_bytes, v, v_bytes)
        for (k, k_bytes, _), (v, v_bytes, _) in zip(ks, vs, strict=True)
    )
    kind = StateType(version, bool(v_trans), layers, n_stream, rotation_k, rotation_v)
    return State(kind, positions, tuple(k[2] for k in ks), tuple(v[2] for v in vs))


def _positions(reader: Reader, cells: int, extension_words: int) -> np.ndarray:
    """Cells hold one sequence id, or none: a copied range shows up without ids (n_seq_max 1)."""
    _, n_seq = reader.take(_CELL)
    reader.at -= _CELL.size
    if n_seq > 1:
        raise Unsupported(f"a cell that {n_seq} sequences share is not one sequence's state")
    words = 2 + extension_words + n_seq
    table = np.frombuffer(reader.bytes(4 * words * cells), "<i4").reshape(cells, words)
    if not (table[:, 1] == n_seq).all():
        raise Damaged("the state's cells differ in their number of sequence ids")
    if n_seq and not (table[:, -1] == table[0, -1]).all():
        raise Unsupported("cells of several sequences are not one sequence's state")
    return table[:, 0].astype(np.int64)


def _k_rows(reader: Reader, cells: int) -> tuple[GgmlType, int, Array]:
    number, row_bytes = reader.take(_ROWS)
    kind = ggml_type(number)
    if row_bytes == 0 or row_bytes % kind.bytes:
        raise Damaged(f"rows of {row_bytes} bytes are no whole number of {kind.name} blocks")
    area = np.frombuffer(reader.bytes(cells * row_bytes), np.uint8)
    return kind, row_bytes, _by_token(area, cells, kind, False)


def _v_columns(reader: Reader, cells: int) -> tuple[GgmlType, int, Array]:
    number, element_bytes, width = reader.take(_COLUMNS)
    kind = ggml_type(number)
    if kind.quantized or element_bytes != kind.bytes or width == 0:
        raise Unsupported(f"transposed V of type {kind.name} with {element_bytes}-byte elements")
    area = np.frombuffer(reader.bytes(cells * width * element_bytes), np.uint8)
    return kind, width * element_bytes, _by_token(area, cells, kind, True)
