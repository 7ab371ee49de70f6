"""What a reader of another tool's file gives, and what a writer takes: rows in the order of their
positions, with what the file says of them and no more.

Files are bytes by relative path: one entry for a file, several for a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvsnap.formats.errors import UsageError
from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds

Files: TypeAlias = Mapping[str, memoryview]
"""Relative path, `/` between its parts → content."""

GGUF, HALVES = "gguf", "halves"
"""Order of a K head's elements. GGUF: as the model's GGUF file has them, which for some architectures
is interleaved (pairs 2i, 2i + 1) and for others halves; HALVES: (i, i + D / 2), as in transformers."""


@dataclass(frozen=True, kw_only=True)
class ForeignRows:
    """`k`, `v`: per layer [tokens, row] at positions 0..tokens-1, unsigned integers as wide as an
    element; bytes for ggml's quantized types. Views of the file where that is possible."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]
    k_type: str
    """ggml's name of the element type: f16, bf16, f32, or a quantized one."""
    v_type: str
    order: str
    """GGUF or HALVES, of K."""
    heads: int | None = None
    """KV heads of a layer and elements of a head, where the file tells them."""
    head_dim: int | None = None
    rotation: tuple[int, int] | None = (0, 0)
    """Size of the Hadamard matrix that K and V were multiplied by; None: the file does not tell."""
    token_ids: TokenIds | None = None
    """As the file has them; as many as there are rows."""
    ids_proven: bool = False
    """Whether a hash in the file or its name agrees with `token_ids`, which the caller gave."""
    inexact: str = ""
    """Why the rows are not those that the engine computed (decoded from 4 bits); empty: they are."""
    told: Mapping[str, str] = field(default_factory=dict)
    """What else the file says, for people: version, architecture, the model's name."""

    @property
    def tokens(self) -> int:
        return len(self.k[0]) if self.k else 0


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the caller knows besides the file. Readers and writers say by name which of it they miss."""

    token_ids: TokenIds | None = None
    layers: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    dtype: str | None = None
    """As `ForeignRows.k_type`."""
    model_name: str | None = None
    architecture: str | None = None
    """GGUF's word, of the target engine."""
    block: int | None = None
    """Tokens of an engine's block (vLLM, LMCache) or page (SGLang)."""
    chunk: int | None = None
    """Tokens of an LMCache chunk."""
    page_layout: str | None = None
    """SGLang's hicache_mem_layout."""
    version: int | None = None
    """Of the format, for writers of formats that have several."""
    streams: int = 1
    """llama.cpp: n_stream of the target; 1 unless it has several slots and no unified KV."""
    v_transposed: bool = False
    """llama.cpp: V as a context without flash attention has it."""
    rotation: tuple[int, int] = (0, 0)
    """llama.cpp: what the target rotates by."""
    batch_row: int | None = None
    """Which sequence of a batch, where a file holds several."""


@dataclass(frozen=True)
class Format:
    """One format. `recognise` looks at names and first bytes only; `read` raises `Damaged`,
    `Unsupported` or `UsageError` (something that must be given is not); `write` is None where nobody
    can read what would be written."""

    name: str
    title: str
    recognise: Callable[[Files], bool]
    read: Callable[[Files, Given], ForeignRows]
    write: Callable[[ForeignRows, Given], dict[str, bytes]] | None = None
    order: str = HALVES
    """Of K's elements, as `write` wants them."""
    is_folder: bool = False
    """Whether what is written is a folder of files, whose names tell something."""
    has_versions: bool = False
    """Whether `write` looks at the version that is wanted."""


def only(files: Files) -> memoryview:
    """The one file of a format that has one."""
    if len(files) != 1:
        raise UsageError(f"this format is one file, not {len(files)}", "name the file itself")
    return next(iter(files.values())).cast("B")
