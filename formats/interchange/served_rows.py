"""What readers and writers of serving engines' files share: facts that no file of theirs holds, and
chains of names that are hashes of token ids.

Their pages and chunks are bare elements. Shape, element type and tokens of a page come from the caller,
and only a size and a name can contradict them. A name is a hash over the tokens of its part and of all
parts before, so given ids are proven by it; what the bytes under that name are is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import HALVES, Files, ForeignRows, Given
from kvsnap.formats.interchange.ggml import ggml_type_named
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds, token_array

_MEANING = {
    "layers": "the number of layers",
    "heads": "the number of KV heads",
    "head_dim": "the elements of a head",
    "block": "the tokens of the engine's block or page",
    "chunk": "the tokens of an LMCache chunk",
    "dtype": "the element type (bf16, f16 or f32)",
    "model_name": "the name that the engine serves the model under",
    "token_ids": "the token ids",
}
_OPTIONS = {"block": " (--block-tokens)", "chunk": " (--chunk-tokens)"}
_MOST = 2**31 - 1


def given_size(given: Given, name: str) -> int:
    """A count that the caller must give; `UsageError` names it where it is missing or no count."""
    value = getattr(given, name)
    if value is None:
        hint = f"give {name}{_OPTIONS.get(name, '')}"
        raise UsageError(f"nothing tells {_MEANING[name]}", hint)
    if type(value) is not int or not 1 <= value <= _MOST:
        raise UsageError(f"{name} is {value!r}, and {_MEANING[name]} is a number from 1 on")
    return value


def given_ids(given: Given) -> TokenIds:
    if given.token_ids is None:
        raise UsageError(
            "these files have no token ids, only hashes of them",
            "give the token ids that they hold",
        )
    return token_array(given.token_ids)


def element_bytes(dtype: str | None) -> int:
    """Bytes of one element; `Unsupported` for a type that no engine's cache of plain elements has."""
    if dtype is None:
        raise UsageError(f"nothing tells {_MEANING['dtype']}", "give dtype")
    kind = ggml_type_named(dtype)
    if kind.quantized:
        raise Unsupported(f"pages of type {kind.name} are llama.cpp's alone")
    return kind.bytes


def check_agrees(given: Given, **found: int) -> None:
    """`UsageError` where the file's shape is not the one that was given."""
    for name, value in found.items():
        wanted = getattr(given, name)
        if wanted is not None and wanted != value:
            raise UsageError(
                f"{name} is {value} in the file, and {wanted} was given",
                "give the model that the file was made with",
            )


def check_chain(names: Sequence[str], there: Sequence[bool], part: int, what: str) -> int:
    """How many parts of the given ids are there: all. `names`: hash of each part of `part` tokens.

    Raises `UsageError` for ids of less than a part, or of which none is there, and `Damaged` for a
    part that is missing: whether it was evicted or the ids differ from there on, nothing tells.
    """
    if not names:
        raise UsageError(
            f"fewer token ids than one {what} has ({part})", f"{what}s are stored whole: give more"
        )
    if not any(there):
        raise UsageError(
            f"no {what} here is of the token ids given: their hash differs",
            f"give the ids exactly as the engine read them, and its own size of a {what}",
        )
    first = there.index(False) if not all(there) else len(names)
    if first < len(names):
        hint = f"give the first {first * part} token ids only, to take what is there"
        raise Damaged(
            f"{what} {first} of {len(names)} is missing, tokens {first * part} to"
            f" {(first + 1) * part - 1}: it went, or the token ids differ from there on",
            hint if first else "without the first one nothing of it can be used",
        )
    return len(names)


def read_parts(
    files: Files,
    places: Mapping[str, str],
    names: Sequence[str],
    part: int,
    what: str,
    given: Given,
) -> list[memoryview]:
    """Contents of all parts of the given ids, in order. `places`: hash of a part → its path.

    Raises as `check_chain`, and `Damaged` for a part that has not the size of its tokens' rows."""
    check_chain(names, [name in places for name in names], part, what)
    layers, heads, dim = (given_size(given, name) for name in ("layers", "heads", "head_dim"))
    size = 2 * layers * part * heads * dim * element_bytes(given.dtype)
    contents = [files[places[name]].cast("B") for name in names]
    for number, content in enumerate(contents):
        if len(content) != size:
            raise Damaged(
                f"{what} {number} has {len(content)} bytes, where {layers} layers, {heads} heads of"
                f" {dim}, {part} tokens and {given.dtype} take {size}",
                f"give what the engine ran with; if the other {what}s fit, this one is cut",
            )
    return contents


def by_token(layers: Iterable[Array]) -> tuple[Array, ...]:
    """Rows [tokens, row] of layers [tokens, heads, head_dim]."""
    return tuple(layer.reshape(len(layer), -1) for layer in layers)


def proven_rows(planes: Array, given: Given, ids: TokenIds, told: dict[str, str]) -> ForeignRows:
    """Of K and V [2, layers, tokens, heads, head_dim], whose ids a hash has proven."""
    heads, dim = planes.shape[3:]
    return ForeignRows(
        k=by_token(planes[0]),
        v=by_token(planes[1]),
        k_type=str(given.dtype),
        v_type=str(given.dtype),
        order=HALVES,
        heads=heads,
        head_dim=dim,
        token_ids=ids[: planes.shape[2]],
        ids_proven=True,
        told=told,
    )


def stacked(rows: ForeignRows, given: Given, part: int, tool: str) -> tuple[Array, Array]:
    """K and V [layers, tokens, heads, head_dim] to write, up to the last whole `part` tokens.

    Raises `UsageError` for rows that must be converted first, that do not fit together, or of which
    heads or ids are not known, `Unsupported` for element types that these files are not known to have.
    """
    if rows.order != HALVES:
        raise UsageError(
            f"{tool} has K in the order of transformers, and these rows are in order {rows.order}",
            "convert the rows first",
        )
    if rows.k_type != rows.v_type:
        raise Unsupported(f"{tool} has K and V in one type, not {rows.k_type} and {rows.v_type}")
    if rows.rotation != (0, 0) or rows.inexact:
        raise UsageError(
            f"{tool} holds what the engine computed, and these rows are rotated or rounded",
            "give rows of an engine that keeps them in f32, f16 or bf16",
        )
    wide = element_bytes(rows.k_type)
    if given.dtype not in (None, rows.k_type):
        raise UsageError(f"the rows are {rows.k_type}, the target's {given.dtype}")
    ids = rows.token_ids
    if ids is None or len(token_array(ids)) != rows.tokens:
        raise UsageError(f"{tool} names its files by hashes of token ids", "give one for each row")
    heads, head_dim = _shape(rows, given)
    tokens = rows.tokens // part * part
    if not tokens or len(rows.k) != len(rows.v):
        raise UsageError(
            f"{rows.tokens} tokens, {len(rows.k)} layers of K and {len(rows.v)} of V give no whole"
            f" {part} tokens to write"
        )
    for layer in (*rows.k, *rows.v):
        if layer.dtype != np.dtype(f"u{wide}") or layer.shape != (rows.tokens, heads * head_dim):
            raise UsageError(
                f"rows of type {rows.k_type} are [{rows.tokens}, {heads * head_dim}] of {wide}-byte"
                f" unsigned integers, not {list(layer.shape)} of {layer.dtype}"
            )
    shape = (len(rows.k), tokens, heads, head_dim)
    k, v = (np.stack([layer[:tokens] for layer in plane]) for plane in (rows.k, rows.v))
    return k.reshape(shape), v.reshape(shape)


def _shape(rows: ForeignRows, given: Given) -> tuple[int, int]:
    for name in ("heads", "head_dim"):
        own, wanted = getattr(rows, name), getattr(given, name)
        if own is not None and wanted not in (None, own):
            raise UsageError(f"{name} of the rows is {own}, and {wanted} was given")
    heads = rows.heads if rows.heads is not None else given_size(given, "heads")
    dim = rows.head_dim if rows.head_dim is not None else given_size(given, "head_dim")
    return heads, dim


def safe_model(name: str | None, slash: str, forbidden: str = "") -> str:
    """A model's name as it stands in a file's: `slash` for each `/`. Raises `UsageError`."""
    if not name:
        raise UsageError(
            f"{_MEANING['model_name']} stands in the files' names", "give --model-name"
        )
    safe = name.replace("/", slash)
    if not safe.isprintable() or any(sign in safe for sign in forbidden) or len(safe) > 128:
        raise UsageError(f"{name!r} cannot stand in the name of a file of this engine")
    return safe
