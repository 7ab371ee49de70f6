"""Rows of llama.cpp's states as other tools' rows, and back: what its file formats share.

A cell's place in a state says nothing, its position does: cells lie where the engine found room.
Neither is a list of tokens bound to the cells beside it. llama.cpp checks neither, so it is done here:
each position from 0 on once, and no token without its row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, ForeignRows, Given
from kvsnap.formats.interchange.ggml import GgmlType, ggml_type_named
from kvsnap.formats.interchange.llamacpp import LayerType, State, StateType, order_of
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds, token_array

_LARGEST_ID = 2**31 - 1
"""llama_token is an i32."""
_ROTATIONS = (64, 128, 256, 512, 1024)
"""64 * 2^n, the largest that divides a head; whoever undoes one makes a matrix of its square."""


def ids_of(words: Array) -> TokenIds:
    """Token ids out of a file's i32 words. Raises `Unsupported` for -1, which stands for media."""
    if (words == -1).any():
        raise Unsupported(
            "the file's token list holds -1: positions of an image or of sound",
            "only files of text can be read",
        )
    if (words < 0).any():
        raise Damaged("the file's token list holds negative ids")
    return words.astype(np.uint32)


def writable_ids(token_ids: TokenIds) -> TokenIds:
    """Token ids that a file can hold: at least one, none above i32. Raises `UsageError`."""
    ids = token_array(token_ids)
    if not ids.size:
        raise UsageError("a file of no tokens holds nothing to restore", "give at least one token")
    if int(ids.max()) > _LARGEST_ID:
        raise UsageError(f"token id {int(ids.max())} does not fit llama.cpp's i32")
    return ids


def by_position(state: State, tokens: int) -> State:
    """The rows of positions 0..tokens-1, in their order; views where the cells lie so already.

    Raises `Damaged` unless the cells are positions 0..cells-1, each once, and no fewer than tokens.
    """
    return rows_from(state, 0, tokens)


def rows_from(state: State, first: int, tokens: int) -> State:
    """The same for rows of positions first..tokens-1, as windowed layers have them."""
    cells = len(state.positions)
    if tokens > first + cells:
        raise Damaged(
            f"the file lists {tokens} tokens and holds the rows of {first + cells}",
            "llama.cpp fails on such a file too: save it anew",
        )
    order = order_of(state.positions, first, first + cells)
    take = slice(tokens - first) if order is None else order[: tokens - first]
    return replace(
        state,
        positions=np.arange(first, tokens, dtype=np.int64),
        k=tuple(rows[take] for rows in state.k),
        v=tuple(rows[take] for rows in state.v),
    )


def foreign_rows(
    state: State, token_ids: TokenIds | None, given: Given, told: dict[str, str]
) -> ForeignRows:
    """What a state with its file's token list says. The file's list is taken; where it has none,
    the given one, and then all rows where that is missing too."""
    wanted = given.token_ids
    if token_ids is None:
        token_ids = None if wanted is None else token_array(wanted)
    elif wanted is not None and not np.array_equal(token_ids, token_array(wanted)):
        raise UsageError(
            f"the file's own {len(token_ids)} token ids are not those given",
            "leave them out: the file has its own",
        )
    cells = len(state.positions)
    if not cells:
        raise Unsupported("the file holds no rows", "save a context that evaluated something")
    state = by_position(state, cells if token_ids is None else len(token_ids))
    if not len(state.positions):
        raise Unsupported("the file's token list is empty", "give the token ids of its rows")
    k, v = (_one_type(state, which) for which in ("k", "v"))
    _check_rotation(state.type)
    rotation: tuple[int, int] | None = (state.type.rotation_k, state.type.rotation_v)
    if state.type.version < 4:  # not recorded before
        rotation = None if k.quantized or v.quantized else (0, 0)
    return ForeignRows(
        k=state.k,
        v=state.v,
        k_type=k.name,
        v_type=v.name,
        order=GGUF,
        rotation=rotation,
        token_ids=token_ids,
        told=told,
    )


def _check_rotation(kind: StateType) -> None:
    """A rotation turns runs of its size, and no head is longer than the largest."""
    for layer in kind.layers:
        for size, found, row in (
            (kind.rotation_k, layer.k, layer.k_bytes),
            (kind.rotation_v, layer.v, layer.v_bytes),
        ):
            elements = row // found.bytes * found.block
            if size and (size not in _ROTATIONS or elements % size):
                raise Damaged(f"rows of {row} bytes of {found.name} are not rotated by {size}")


def _one_type(state: State, which: str) -> GgmlType:
    types = {getattr(layer, which).number: getattr(layer, which) for layer in state.type.layers}
    if len(types) != 1:
        names = ", ".join(sorted(found.name for found in types.values()))
        raise Unsupported(f"layers whose {which.upper()} differ in type ({names})")
    found: GgmlType = next(iter(types.values()))
    return found


def kind_of(rows: ForeignRows, given: Given, version: int) -> StateType:
    """The type of state that holds these rows in the target that was given.

    Raises `UsageError` for rows that must be converted first or do not fit together, `Unsupported`
    for what a state of this version cannot say.
    """
    if rows.order != GGUF:
        raise UsageError(
            f"llama.cpp has K in the order of its GGUF file, and these rows are in order {rows.order}",
            "convert the rows first",
        )
    k_type, v_type = ggml_type_named(rows.k_type), ggml_type_named(rows.v_type)
    if rows.rotation is None and version >= 4:
        raise Unsupported(
            "nothing says whether these quantized rows are rotated, and version 4 records it",
            "write version 3, for the build of llama.cpp that they come from",
        )
    if rows.rotation is not None and rows.rotation != given.rotation:
        raise UsageError(
            f"the rows are rotated by {rows.rotation} and the target by {given.rotation}",
            "give the target's rotation, or rows that are rotated as it rotates",
        )
    if given.v_transposed and v_type.quantized:
        raise Unsupported(
            f"V of type {v_type.name} cannot be transposed",
            "llama.cpp quantizes V with flash attention only, which does not transpose",
        )
    if not 1 <= given.streams <= 256:  # LLAMA_MAX_SEQ
        raise UsageError(f"llama.cpp has 1 to 256 streams, not {given.streams}")
    if not rows.k or len(rows.k) != len(rows.v):
        raise UsageError(f"{len(rows.k)} layers of K and {len(rows.v)} of V are no model's rows")
    layers = tuple(
        LayerType(
            k_type, _row_bytes(k, k_type, rows.tokens), v_type, _row_bytes(v, v_type, rows.tokens)
        )
        for k, v in zip(rows.k, rows.v, strict=True)
    )
    return StateType(version, given.v_transposed, layers, given.streams, *(rows.rotation or (0, 0)))


def _row_bytes(rows: Array, kind: GgmlType, tokens: int) -> int:
    wide = 1 if kind.quantized else kind.bytes
    if rows.dtype != np.dtype(f"u{wide}") or rows.ndim != 2 or len(rows) != tokens:
        raise UsageError(
            f"rows of type {kind.name} are [{tokens}, row] of {wide}-byte unsigned integers,"
            f" not {list(rows.shape)} of {rows.dtype}"
        )
    size = int(rows.shape[1]) * wide
    if not size or size % kind.bytes:
        raise UsageError(f"rows of {size} bytes are no whole number of {kind.name} blocks")
    return size


def ids_for(rows: ForeignRows) -> TokenIds:
    """The token ids to write beside rows; `UsageError` where they are missing, or not as many."""
    if rows.token_ids is None:
        raise UsageError("this format holds token ids, and these rows have none", "give them")
    ids = writable_ids(rows.token_ids)
    if len(ids) != rows.tokens:
        raise UsageError(f"{len(ids)} token ids do not go with the rows of {rows.tokens} tokens")
    return ids


def fill(k: tuple[Array, ...], v: tuple[Array, ...], rows: ForeignRows) -> None:
    """Copy rows into the views that an unfilled state gave."""
    for target, source in zip((*k, *v), (*rows.k, *rows.v), strict=True):
        target[...] = source
