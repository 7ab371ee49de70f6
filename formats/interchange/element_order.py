"""Order of the elements of K's heads: GGUF's and transformers', where they are known to be what they are.

RoPE turns pairs of elements. transformers, mlx-lm, vLLM and SGLang pair (i, i + D / 2). llama.cpp pairs
the same in some architectures (LLAMA_ROPE_TYPE_NEOX); in others (LLAMA_ROPE_TYPE_NORM) it pairs
(2i, 2i + 1), and the converter to GGUF moves the rows of the Q and K weights there (`LlamaModel.permute`
in conversion/llama.py), so that K rows are those of transformers in another order. No size tells which:
a cache in the wrong order loads, and the model writes other text. So: a table, and a refusal where it has
nothing to say.

Sources, llama.cpp b11434: `llama_model_rope_type` in src/llama-model.cpp; `permute` and `undo_permute` in
conversion/*.py. Architectures whose K is interleaved in transformers, too (Cohere, DeepSeek's latent
attention, Llama 4), and those with several positions a token (M-RoPE) are left out.
"""

from __future__ import annotations

import numpy as np

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.interchange.foreign import GGUF, HALVES
from kvsnap.formats.layout import Array

_MOVED = {
    "arcee": ("arcee",),
    "granite": ("granite",),
    "granitemoe": ("granitemoe",),
    "llama": ("llama", "mistral", "mixtral"),
    "minicpm": ("minicpm",),
    "mistral3": ("ministral3",),
    "olmo": ("olmo",),
}
"""GGUF's name → model types of transformers. The converter moves elements: interleaved in GGUF."""
_EQUAL = {
    "apertus": ("apertus",),
    "exaone4": ("exaone4",),
    "gemma": ("gemma",),
    "gemma2": ("gemma2",),
    "gemma3": ("gemma3_text",),
    "gptneox": ("gpt_neox",),
    "hunyuan-dense": ("hunyuan_v1_dense",),
    "nemotron": ("nemotron",),
    "olmo2": ("olmo2",),
    "olmoe": ("olmoe",),
    "phi2": ("phi",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen2moe": ("qwen2_moe",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3_moe",),
    "seed_oss": ("seed_oss",),
    "stablelm": ("stablelm",),
    "starcoder2": ("starcoder2",),
}
"""The same order in both."""
MOVED = frozenset(name for own, types in _MOVED.items() for name in (own, *types))
"""Names of both kinds: in GGUF their K is interleaved, and transformers undoes that when it loads one."""


def is_moved(architecture: str) -> bool:
    """Whether K's elements stand in another order in GGUF than in transformers. `architecture` is
    GGUF's name or the model type of transformers; `Unsupported` where the table does not have it."""
    if architecture in MOVED:
        return True
    if any(architecture in (name, *types) for name, types in _EQUAL.items()):
        return False
    raise Unsupported(
        f"nobody told kvsnap how K of architecture {architecture!r} is ordered in GGUF and in"
        " transformers",
        "take a file of the engine's own kind; between engines: " + ", ".join([*_MOVED, *_EQUAL]),
    )


def reordered(
    rows: Array, *, order: str, wanted: str, architecture: str, head_dim: int, rotated: int
) -> Array:
    """K rows [tokens, heads * head_dim] of one layer in the order that is wanted.

    `rotated`: how many elements of a head RoPE turns. The converter moves all of a head; what it does
    to partly rotated ones was never seen, and is refused."""
    if order == wanted or not is_moved(architecture):
        return rows
    if rotated != head_dim:
        raise Unsupported(
            f"RoPE turns {rotated} of {head_dim} elements of a head: their order in the other engine"
            " is not known"
        )
    if (order, wanted) == (GGUF, HALVES):
        return _split(rows, (-1, head_dim // 2, 2))
    return _split(rows, (-1, 2, head_dim // 2))


def _split(rows: Array, shape: tuple[int, int, int]) -> Array:
    parts = rows.reshape(len(rows), *shape)
    return np.ascontiguousarray(parts.swapaxes(-1, -2)).reshape(rows.shape)
