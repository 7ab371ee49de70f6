"""What decides llama.cpp's KV bytes, read from a live `Llama`; and what kvsnap refuses by name.

What an application sets through the C API alone cannot be read back and is not seen here: LoRA and
control vectors, `llama_set_causal_attn`. Make the adapter after loading, and leave those alone.

Sources: llama.cpp src/llama-context.cpp (how context parameters override the model's),
src/llama-kv-cache.cpp (rotation, streams, transposition), src/llama-model.cpp (long RoPE factors).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import llama_cpp

from kvsnap.engines.gguf import model_shards, weights_digest
from kvsnap.engines.llamacpp_memory import Memory, kinds_of, kv_plane, probe
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.identity import Adapter, Identity, Rope
from kvsnap.formats.interchange.ggml import GgmlType, ggml_type
from kvsnap.formats.interchange.llamacpp import LayerType, State, StateType, check_version
from kvsnap.formats.layout import Group, Layout, PlaneRope

FAMILY = "llama.cpp"
_NOT_YET = "use another model; kvsnap does not handle these yet"
_ROPE_TYPES = {-1: "none", 0: "norm", 2: "neox"}
_SCALINGS = {0: "none", 1: "linear", 2: "yarn", 3: "longrope"}


@dataclass(frozen=True)
class Facts:
    """What the adapter needs of one context. `layers`: (K type, K bytes, V type, V bytes)."""

    architecture: str
    heads: tuple[int, ...]
    k_dim: int
    v_dim: int
    layers: tuple[tuple[GgmlType, int, GgmlType, int], ...]
    state_version: int
    v_trans: bool
    n_stream: int
    rotation_k: int
    rotation_v: int
    rope: Rope | None
    rope_dims: int


def read_facts(llm: llama_cpp.Llama) -> Facts:
    """Raises `Unsupported` before anything of the engine is touched."""
    check_version(llama_cpp.LLAMA_STATE_SEQ_VERSION)
    _refuse_what_is_not_plain(llm)
    meta, params = llm.metadata, llm.context_params
    architecture = meta.get("general.architecture", "")
    layers = int(llama_cpp.llama_model_n_layer(llm.model))
    heads = _per_layer(meta.get(f"{architecture}.attention.head_count_kv"), layers)
    if heads is None:
        heads = (int(llama_cpp.llama_model_n_head_kv(llm.model)),) * layers
    width = llm.n_embd() // max(1, int(llama_cpp.llama_model_n_head(llm.model)))
    k_dim = int(meta.get(f"{architecture}.attention.key_length", width))
    v_dim = int(meta.get(f"{architecture}.attention.value_length", width))
    k_type, v_type = ggml_type(params.type_k), ggml_type(params.type_v)
    rotates = not _truthy_like_atoi(os.environ.get("LLAMA_ATTN_ROT_DISABLE"))
    rotation_k = _largest_power(k_dim) if rotates and k_type.quantized else 0
    rotation_v = 64 if rotates and v_type.quantized and v_dim % 64 == 0 else 0
    return Facts(
        architecture=architecture,
        heads=heads,
        k_dim=k_dim,
        v_dim=v_dim,
        layers=tuple(
            (k_type, k_type.row_bytes(n * k_dim), v_type, v_type.row_bytes(n * v_dim))
            for n in heads
        ),
        state_version=llama_cpp.LLAMA_STATE_SEQ_VERSION,
        v_trans=params.flash_attn_type != llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
        n_stream=1 if params.kv_unified else max(1, params.n_seq_max),
        rotation_k=rotation_k,
        rotation_v=rotation_v,
        rope=_rope(llm, architecture),
        rope_dims=int(meta.get(f"{architecture}.rope.dimension_count", k_dim)),
    )


def memory_of(llm: llama_cpp.Llama, facts: Facts) -> Memory:
    """From metadata, or from the context's own state where metadata does not tell all. That of a
    context is found once: adapters come and go."""
    known: Memory | None = getattr(llm, "_kvsnap_memory", None)
    if known is None:
        plain = kinds_of(llm) == [State]
        heads = max(facts.heads, default=1) or 1
        ropes = (_plane_rope(facts), None)  # windowed layers often rotate by another base
        known = _plain_memory(facts) if plain else probe(llm, facts.state_version, heads, ropes)
        if not plain and any(isinstance(p, StateType) and p.n_stream > 1 for p in known.parts):
            raise Unsupported(
                "this model's memory in several streams is not handled",
                "make the Llama with one sequence",
            )
        llm._kvsnap_memory = known
    return known


def _plain_memory(facts: Facts) -> Memory:
    """Runs of layers with equal heads are one group; all of them, in nearly every model."""
    groups = []
    for number, (heads, run) in enumerate(groupby(facts.heads)):
        k_type, _, v_type, _ = facts.layers[0]
        k_bytes = k_type.row_bytes(heads * facts.k_dim)
        v_bytes = v_type.row_bytes(heads * facts.v_dim)
        planes = (
            kv_plane("k", k_type, k_bytes, heads, _plane_rope(facts)),
            kv_plane("v", v_type, v_bytes, heads, None),
        )
        name = "full" if len(set(facts.heads)) == 1 else f"full{number}"
        groups.append(Group(name=name, layers=len(list(run)), planes=planes))
    part = StateType(
        version=facts.state_version,
        v_trans=facts.v_trans,
        layers=tuple(LayerType(*layer) for layer in facts.layers),
        n_stream=facts.n_stream,
        rotation_k=facts.rotation_k,
        rotation_v=facts.rotation_v,
    )
    return Memory(facts.state_version, (part,), (tuple(groups),), 0)


def identity_of(
    llm: llama_cpp.Llama,
    facts: Facts,
    layout: Layout,
    block_size: int,
    file_digest: Callable[[Path], str],
) -> Identity:
    """The identity of a live context; `file_digest` hashes files and may remember them."""
    adapters: tuple[Adapter, ...] = ()
    if llm.lora_path:
        digest = file_digest(Path(llm.lora_path))
        adapters = (Adapter(kind="lora", digest=digest, scale=float(llm.lora_scale)),)
    overrides = sorted((llm.kv_overrides or {}).items())
    return Identity(
        family=FAMILY,
        weights=weights_digest(Path(llm.model_path), file_digest),
        architecture=facts.architecture,
        layout=layout,
        rope=facts.rope,
        block_size=block_size,
        adapters=adapters,
        rotation_k=facts.rotation_k,
        rotation_v=facts.rotation_v,
        overrides=tuple((key, f"{type(v).__name__}:{v!r}") for key, v in overrides),
    )


def refuse_media(llm: llama_cpp.Llama) -> None:
    """A handler with a projector evaluates images whose token ids say nothing of them."""
    if getattr(llm.chat_handler, "clip_model_path", None) is not None:
        raise Unsupported(
            "this Llama has a media chat handler, and token ids do not tell images apart",
            "use it without kvsnap, or a text-only chat handler with kvsnap",
        )


def stamps_of(llm: llama_cpp.Llama) -> tuple[tuple[int, ...], ...]:
    """What tells that a file of the model or adapter was replaced; missing files tell it too."""
    paths = [*model_shards(Path(llm.model_path)), *([Path(llm.lora_path)] if llm.lora_path else [])]
    return tuple(map(stamp_of, paths))


def stamp_of(path: Path) -> tuple[int, ...]:
    """Empty for a file that is not there."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_what_is_not_plain(llm: llama_cpp.Llama) -> None:
    model, params = llm.model, llm.context_params
    refuse_media(llm)
    if not llama_cpp.llama_get_memory(llm.ctx):
        raise Unsupported("this context keeps no KV cache", "use a model that generates text")
    architecture = llm.metadata.get("general.architecture", "")
    if not architecture:
        raise Unsupported(
            "the model's metadata cannot be read, and it decides what its KV means",
            "llama-cpp-python gives none where one value is no UTF-8: mend the GGUF file",
        )
    causal = llm.metadata.get(f"{architecture}.attention.causal", "true")
    if params.attention_type == llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL or causal == "false":
        raise Unsupported("with non-causal attention a prefix depends on what follows", _NOT_YET)
    if params.embeddings:
        raise Unsupported(
            "an embedding context has no conversation to save", "make the Llama without embedding"
        )
    if llama_cpp.llama_model_has_encoder(model):
        raise Unsupported("encoder-decoder models are not handled", _NOT_YET)
    rope = llama_cpp.llama_model_rope_type(model)
    if rope not in _ROPE_TYPES:
        raise Unsupported(f"this model has multi-axis RoPE (type {rope})", _NOT_YET)
    if f"{architecture}.attention.kv_lora_rank" in llm.metadata:
        raise Unsupported("this model has latent attention", _NOT_YET)


def _rope(llm: llama_cpp.Llama, architecture: str) -> Rope | None:
    rope_type = _ROPE_TYPES[llama_cpp.llama_model_rope_type(llm.model)]
    if rope_type == "none":
        return None
    meta, params = llm.metadata, llm.context_params
    scaling = _SCALINGS.get(params.rope_scaling_type) or meta.get(
        f"{architecture}.rope.scaling.type", "linear"
    )
    scale = params.rope_freq_scale or llama_cpp.llama_model_rope_freq_scale_train(llm.model)
    trained = llama_cpp.llama_model_n_ctx_train(llm.model)
    models_own = int(meta.get(f"{architecture}.rope.scaling.original_context_length", trained))
    original = params.yarn_orig_ctx or models_own
    return Rope(
        type=rope_type,
        base=float(params.rope_freq_base or meta.get(f"{architecture}.rope.freq_base", 10000.0)),
        scale=1.0 if scaling == "none" else float(scale),
        scaling=scaling,
        original_context=int(original),
        extension_factor=_set(params.yarn_ext_factor),
        attention_factor=_set(params.yarn_attn_factor),
        beta_fast=_set(params.yarn_beta_fast),
        beta_slow=_set(params.yarn_beta_slow),
        # llama_model::get_rope_factors picks the long factors by the context that was built, and
        # by the model's own original length whatever the caller says.
        long_context=llm.n_ctx() > models_own,
    )


def _plane_rope(facts: Facts) -> PlaneRope | None:
    """Where angles follow from base and scale alone; other schemes change them pair by pair. So do
    a model's own factors (`rope_freqs`), which cannot be read here: codecs lose bytes by that,
    never values."""
    rope = facts.rope
    if rope is None or rope.scaling not in ("none", "linear") or facts.rope_dims > facts.k_dim:
        return None
    pairing = {"norm": "interleaved", "neox": "halves"}[rope.type]
    return PlaneRope(pairing=pairing, dims=facts.rope_dims, base=rope.base, scale=rope.scale)


def _per_layer(text: str | None, layers: int) -> tuple[int, ...] | None:
    """`head_count_kv` is a number, or an array that the library prints like [8, 8, 4]."""
    numbers = [int(n) for n in re.findall(r"\d+", text or "")]
    if len(numbers) == 1:
        return (numbers[0],) * layers
    return tuple(numbers) if len(numbers) == layers else None


def _set(value: Any) -> float | None:
    """Negative means: as the model says, which the weights digest covers."""
    return float(value) if value >= 0 else None


def _largest_power(dim: int) -> int:
    """Rotation of K: the largest 64 * 2^n that divides the head's width (build_input_k_rot)."""
    size = 64 if dim % 64 == 0 else 0
    while size and dim % (size * 2) == 0:
        size *= 2
    return size


def _truthy_like_atoi(text: str | None) -> bool:
    found = re.match(r"\s*[+-]?\d+", text or "")
    return bool(found and int(found.group()))
