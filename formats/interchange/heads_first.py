"""K and V as transformers and mlx-lm hold them, as rows, and back: what their file formats share.

    one K and one V a layer   [batch, heads, tokens, head_dim], RoPE applied, HALVES, no rotation

Taken are caches whose layers all hold the same tokens from position 0 on. A sliding window's layer, an
older architecture's shape (Bloom: [batch * heads, head_dim, tokens]) and a fused one (Falcon, GPTBigCode)
differ in shape, and are refused. Two of equal shape that mean different things cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.interchange.foreign import HALVES, ForeignRows, Given
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds, token_array

ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4}
SAFETENSORS_TYPES = {"F16": "f16", "BF16": "bf16", "F32": "f32"}
_AXES = 4


@dataclass(frozen=True)
class Pairs:
    """What a file holds. `layers`: at least one K and V, as unsigned integers, contiguous or not."""

    layers: Sequence[tuple[Array, Array]]
    type: str
    token_ids: TokenIds | None = None
    inexact: str = ""
    told: Mapping[str, str] = field(default_factory=dict)


def one_type(dtypes: Sequence[str], names: Mapping[str, str]) -> str:
    """ggml's name of the one type that all tensors have, by the file's names of them."""
    found = sorted(set(dtypes))
    if not found:
        raise Unsupported("the cache has no layers", "save it after the model read a prompt")
    if len(found) > 1:
        raise Unsupported(f"tensors of several element types ({', '.join(found)}) in one cache")
    if found[0] not in names:
        raise Unsupported(f"K and V of type {found[0]}", f"known types: {', '.join(names)}")
    return names[found[0]]


def rows_of(pairs: Pairs, given: Given) -> ForeignRows:
    """Rows [tokens, heads * head_dim] of one sequence.

    Raises `Unsupported` for layers that do not all hold the same tokens, `UsageError` where the file
    is not what was given, or holds several sequences and `batch_row` does not say which.
    """
    batch, heads, tokens, head_dim = _shape(pairs.layers)
    row = _batch_row(batch, given)
    _compare(given, layers=len(pairs.layers), heads=heads, head_dim=head_dim, dtype=pairs.type)
    planes = [
        tuple(
            plane[row].swapaxes(0, 1).reshape(tokens, heads * head_dim)
            for plane in (layer[which] for layer in pairs.layers)
        )
        for which in (0, 1)
    ]
    return ForeignRows(
        k=planes[0],
        v=planes[1],
        k_type=pairs.type,
        v_type=pairs.type,
        order=HALVES,
        heads=heads,
        head_dim=head_dim,
        token_ids=_ids(pairs.token_ids, given, tokens),
        inexact=pairs.inexact,
        told=pairs.told,
    )


def pairs_of(rows: ForeignRows, given: Given) -> list[tuple[Array, Array]]:
    """K and V of each layer, [1, heads, tokens, head_dim], contiguous.

    Raises `UsageError` for rows that must be converted first, or where heads and head_dim are not
    known."""
    if rows.order != HALVES:
        raise UsageError(
            f"this format has K in order {HALVES}, and these rows are in order {rows.order}",
            "convert the rows first",
        )
    if rows.rotation != (0, 0):
        raise UsageError("this format has no rotated rows", "undo the rotation first")
    if rows.k_type != rows.v_type or rows.k_type not in ITEM_BYTES:
        raise UsageError(
            f"this format has K and V of one type of {', '.join(ITEM_BYTES)}, and these rows are"
            f" {rows.k_type} and {rows.v_type}",
            "convert the rows first",
        )
    if given.dtype not in (None, rows.k_type):
        raise UsageError(
            f"the target has {given.dtype} and these rows are {rows.k_type}",
            "convert the rows first: the model answers otherwise with another type",
        )
    heads, head_dim = rows.heads or given.heads, rows.head_dim or given.head_dim
    if not heads or not head_dim:
        raise UsageError(
            "these rows do not say how many heads they have", "give heads and head_dim"
        )
    if not rows.tokens or len(rows.k) != len(rows.v):
        raise UsageError("a cache of no tokens holds nothing to restore")
    for plane in (*rows.k, *rows.v):
        wanted = (rows.tokens, heads * head_dim)
        if plane.shape != wanted or plane.dtype != np.dtype(f"u{ITEM_BYTES[rows.k_type]}"):
            raise UsageError(
                f"rows [{rows.tokens}, {heads} heads of {head_dim}] of {rows.k_type} cannot be"
                f" {list(plane.shape)} of {plane.dtype}"
            )
    return [
        (_heads_first(k, heads, head_dim), _heads_first(v, heads, head_dim))
        for k, v in zip(rows.k, rows.v, strict=True)
    ]


def _heads_first(rows: Array, heads: int, head_dim: int) -> Array:
    by_head = rows.reshape(len(rows), heads, head_dim).swapaxes(0, 1)
    return np.ascontiguousarray(by_head[np.newaxis])


def _shape(layers: Sequence[tuple[Array, Array]]) -> tuple[int, int, int, int]:
    first = layers[0][0].shape
    for number, (k, v) in enumerate(layers):
        for name, plane in (("K", k), ("V", v)):
            if plane.ndim != _AXES:
                raise Unsupported(
                    f"{name} of layer {number} has shape {list(plane.shape)}, not [batch, heads,"
                    " tokens, head_dim]",
                    "caches of this architecture are not known to kvsnap",
                )
            if plane.shape[2] != first[2]:
                raise Unsupported(
                    f"{name} of layer {number} holds {plane.shape[2]} tokens and layer 0 {first[2]}:"
                    " of a sliding window, the tokens before it are gone",
                    "only caches that hold all tokens in all layers can be read",
                )
            if plane.shape != first:
                raise Unsupported(
                    f"{name} of layer {number} has shape {list(plane.shape)} and layer 0's K"
                    f" {list(first)}",
                    "caches of this architecture are not known to kvsnap",
                )
    if 0 in first:
        raise Unsupported(f"the cache is empty: K of shape {list(first)}")
    batch, heads, tokens, head_dim = first
    return batch, heads, tokens, head_dim


def _batch_row(batch: int, given: Given) -> int:
    row = given.batch_row
    if row is None and batch > 1:
        raise UsageError(
            f"the file holds a batch of {batch} sequences",
            "say which (batch row 0 is the first), and see that it has no padding on its left",
        )
    if row is not None and not 0 <= row < batch:
        raise UsageError(f"the file holds {batch} sequences, and none of number {row}")
    return row or 0


def _compare(given: Given, **found: int | str) -> None:
    for name, value in found.items():
        wanted = getattr(given, name)
        if wanted is not None and wanted != value:
            raise UsageError(
                f"the file has {name} {value}, and {wanted} was given",
                "it is the cache of another model",
            )


def _ids(own: TokenIds | None, given: Given, tokens: int) -> TokenIds | None:
    wanted = None if given.token_ids is None else token_array(given.token_ids)
    if own is not None and wanted is not None and not np.array_equal(own, wanted):
        raise UsageError(
            f"the file's own {len(own)} token ids are not those given",
            "leave them out: the file has its own",
        )
    if own is not None and len(own) != tokens:
        # One id more is a token that was not evaluated, or a window's first one that is gone.
        raise Unsupported(
            f"the file holds the rows of {tokens} tokens and {len(own)} token ids: whose the rows are"
            " is not known",
            "save as many ids as the cache has tokens",
        )
    ids = wanted if own is None else own
    if ids is not None and len(ids) != tokens:
        raise UsageError(
            f"the file holds the rows of {tokens} tokens, and {len(ids)} token ids were given",
            "give the ids of exactly the tokens that were saved",
        )
    return ids
