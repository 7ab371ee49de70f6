"""llama-server's slot files: the tokens of one slot's conversation, packed, and its rows.

What `POST /slots/N?action=save` writes (llama.cpp b11434, tools/server/server-common.cpp,
`server_tokens::serialize`, inside `llama_state_seq_save_file`), all little-endian:

    u32 "ggsq" = 0x67677371 | u32 version = 4 | u32 words
    i32 -1 | u32 1, the list's own version | u32 n | i32 token * n
    u32 n_media | u32 first token * n_media | per medium: u32 bytes, chunk     then zeros to a word
    STATE, as formats/interchange/llamacpp.py says, and of a model with sliding windows a second one
    for the layers that have one (llamacpp_memory.py): of those the last window's rows only

`words` counts the packed list: n + 4 for text. Older servers wrote the plain list, i32 token * words,
and newer ones still restore it: a list that does not start with -1 is one. A server of several slots
that does not unify its KV has one stream a slot, and the rows in any of them.

The file does not say which model, RoPE or context it is from; nor checkpoints of sliding-window or
recurrent layers, without which those models read the prompt again. A list longer than the cells makes
the server fail later, and a file that is cut kills its process: hence every check here, and a file
that is written is written to the exact byte.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, Files, ForeignRows, Format, Given, only
from kvsnap.formats.interchange.llamacpp import (
    SUPPORTED_VERSIONS,
    State,
    StateType,
    kv_size,
    parse_sequence,
    write_kv,
)
from kvsnap.formats.interchange.llamacpp_files import (
    HEAD,
    SEQUENCE_MAGIC,
    is_packed,
    is_packed_sequence,
    read_head,
)
from kvsnap.formats.interchange.llamacpp_memory import parse_caches
from kvsnap.formats.interchange.llamacpp_rows import (
    by_position,
    fill,
    foreign_rows,
    ids_for,
    ids_of,
    kind_of,
    rows_from,
    writable_ids,
)
from kvsnap.formats.interchange.state_bytes import Reader, Writer
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds

SLOT_VERSION = 4
"""Of the sequence state that this module writes, the one with its rotation told."""
_PACKED = struct.Struct("<iII")
_WORD = struct.Struct("<I")
_LIST_VERSION = 1
_AROUND = 4
"""Words of a packed list of text that are no tokens: -1, version, n, n_media."""


@dataclass(frozen=True)
class SlotFile:
    """`state`: the rows of positions 0..len(token_ids)-1, in their order; `window`: those of windowed
    layers from some position on, None for models that have none."""

    version: int
    token_ids: TokenIds
    state: State
    window: State | None = None

    @property
    def kinds(self) -> tuple[StateType, ...]:
        """Of each memory that it holds."""
        return (self.state.type,) if self.window is None else (self.state.type, self.window.type)


@dataclass(frozen=True)
class SlotDraft:
    """A slot file but for its rows: `k` and `v` are views into `buffer`, [tokens, row] per layer; windowed
    layers come last."""

    buffer: Array
    k: tuple[Array, ...]
    v: tuple[Array, ...]


def parse_slot(buffer: memoryview, version: int | None = None) -> SlotFile:
    """Parse a slot file whose sequence version is `version`, or any that is known.

    Rows of cells beyond the token list are left out. Raises `Damaged` for a file that is not what it
    claims or does not end where it should, `Unsupported` for media, other versions and models
    with more than attention.
    """
    found, words, rest = read_head(Reader(buffer), SEQUENCE_MAGIC)
    if found not in SUPPORTED_VERSIONS or version not in (None, found):
        known = ", ".join(map(str, SUPPORTED_VERSIONS if version is None else (version,)))
        raise Unsupported(
            f"a slot file of sequence version {found} is not handled (only {known})",
            "use a llama-server that kvsnap supports, or a newer kvsnap",
        )
    token_ids = ids_of(unpacked(words) if is_packed(words) else words)
    full, window = _memories(rest, found)
    state = by_position(full, len(token_ids))
    if window is not None:
        first = int(window.positions.min(initial=len(token_ids)))
        window = rows_from(window, min(first, len(token_ids)), len(token_ids))
    return SlotFile(found, token_ids, state, window)


def _memories(rest: memoryview, version: int) -> tuple[State, State | None]:
    try:
        return parse_sequence(rest, version), None
    except (Damaged, Unsupported):
        with contextlib.suppress(Damaged, Unsupported):
            full, window = parse_caches(rest, version)
            if bool(full.type.layers) == bool(window.type.layers):  # none: the slot is empty
                return full, window
        raise


def unpacked(words: Array) -> Array:
    """The tokens of a packed list of text."""
    if len(words) < _AROUND:
        raise Damaged(f"a packed token list of {len(words)} words is not all of it")
    list_version, tokens = words.view("<u4")[1:3].tolist()
    if list_version != _LIST_VERSION:
        raise Unsupported(
            f"a packed token list of version {list_version} is not known (known: {_LIST_VERSION})",
            "use a llama-server that kvsnap supports, or a newer kvsnap",
        )
    if tokens > len(words) - _AROUND:
        raise Damaged(f"a packed token list of {len(words)} words cannot hold {tokens} tokens")
    media = int(words.view("<u4")[3 + tokens])
    if media:
        raise Unsupported(
            f"the slot holds {media} images or sounds",
            "only slots of text can be read",
        )
    if tokens + _AROUND != len(words):
        raise Damaged(f"{len(words) - tokens - _AROUND} words follow a packed token list of text")
    return words[3 : 3 + tokens]


def assemble_slot(token_ids: TokenIds, *kinds: StateType) -> SlotDraft:
    """A slot file of these tokens for rows to be filled in; their cells are in stream 0. `kinds`: of each
    memory. Windowed layers get the rows of all tokens, which a server with --swa-full has room for.

    `version` must be 4, and the rotation what the target server has. Raises `UsageError` for
    another version, no tokens or ids that are no i32.
    """
    for kind in kinds:
        if kind.version != SLOT_VERSION:
            raise UsageError(
                f"slot files are written with sequence version {SLOT_VERSION}, not {kind.version}"
            )
        if not kind.layers:
            raise UsageError(
                "a slot file needs the types of its layers, and an empty slot has none"
            )
    ids = writable_ids(token_ids)
    words = len(ids) + _AROUND
    size = HEAD.size + 4 * words + sum(kv_size(kind, len(ids)) for kind in kinds)
    writer = Writer(np.empty(size, np.uint8))
    writer.put(HEAD, SEQUENCE_MAGIC, SLOT_VERSION, words)
    writer.put(_PACKED, -1, _LIST_VERSION, len(ids))
    writer.area(4 * len(ids)).view("<u4")[...] = ids
    writer.put(_WORD, 0)
    parts = [write_kv(writer, kind, len(ids), 0, 0) for kind in kinds]
    k = tuple(rows for part in parts for rows in part[0])
    return SlotDraft(writer.finish(), k, tuple(rows for part in parts for rows in part[1]))


def _read(files: Files, given: Given) -> ForeignRows:
    slot = parse_slot(only(files))
    if slot.window is not None:
        raise Unsupported(
            "a slot of a model with sliding windows, of which it holds the last window's rows",
            "kvsnap proxy keeps such slots while their server runs with --swa-full",
        )
    told = {"version": str(slot.version)}
    return foreign_rows(slot.state, slot.token_ids, given, told)


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    if given.version not in (None, SLOT_VERSION):
        raise Unsupported(
            f"slot files are written with sequence version {SLOT_VERSION}, not {given.version}"
        )
    draft = assemble_slot(ids_for(rows), kind_of(rows, given, SLOT_VERSION))
    fill(draft.k, draft.v, rows)
    return {"slot.bin": draft.buffer.tobytes()}


SLOT = Format(
    "llama-server",
    "llama-server slot file",
    is_packed_sequence,
    _read,
    _write,
    order=GGUF,
    has_versions=True,
)
