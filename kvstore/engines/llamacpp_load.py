"""Load a GGUF file the way the command line asks for it, with errors a person can act on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import _internals

from kvsnap.engines.gguf import check_model
from kvsnap.formats.errors import EngineError, NotFound, UsageError
from kvsnap.formats.interchange.ggml import ggml_type_named

ROUND_CONTEXT = 256
"""Contexts are rounded up to this: llama.cpp pads the KV cache to it anyway."""
ALWAYS_TRAINED = 2048
"""No model in use was trained on less; up to here the trained length need not be looked up."""
_SCALINGS = {"none": 0, "linear": 1, "yarn": 2}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The engine options of the command line; None means: as the model says."""

    ctx: int | None = None
    threads: int | None = None
    flash_attn: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    rope_scaling: str | None = None
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    lora: str | None = None


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: object) -> None:
    """For the command line. llama-cpp-python 0.3.36 takes warnings for errors and prints them, also
    where it is not to be verbose; what goes wrong comes as an exception."""


@contextlib.contextmanager
def vocabulary(path: Path) -> Iterator[_internals.LlamaModel]:
    """The model's tokenizer and metadata alone: 60 ms where a context of 8k tokens takes 400."""
    check_model(path)
    llama_cpp.llama_log_set(_silent, None)
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        model = _internals.LlamaModel(path_model=str(path), params=params, verbose=False)
    except ValueError as error:
        raise _broken(path) from error
    try:
        yield model
    finally:
        model.close()


def load_llama(path: Path, options: LoadOptions, tokens: int) -> llama_cpp.Llama:
    """A `Llama` with a context of `options.ctx`, or of `tokens`, at most the trained length."""
    check_model(path)
    llama_cpp.llama_log_set(_silent, None)
    context = options.ctx
    if context is None:
        context = -(-tokens // ROUND_CONTEXT) * ROUND_CONTEXT
        if context > ALWAYS_TRAINED:
            with vocabulary(path) as model:
                context = min(context, _trained_context(model.metadata()) or context)
    threads = options.threads or physical_cores()
    arguments: dict[str, Any] = {
        "n_ctx": context,
        "n_threads": threads,
        "n_threads_batch": threads,
        "flash_attn": options.flash_attn,
        "type_k": ggml_type_named(options.cache_type_k).number,
        "type_v": ggml_type_named(options.cache_type_v).number,
        "rope_freq_base": options.rope_freq_base,
        "rope_freq_scale": options.rope_freq_scale,
        "yarn_orig_ctx": options.yarn_orig_ctx,
        "yarn_ext_factor": options.yarn_ext_factor,
        "yarn_attn_factor": options.yarn_attn_factor,
        "yarn_beta_fast": options.yarn_beta_fast,
        "yarn_beta_slow": options.yarn_beta_slow,
        "verbose": False,
    }
    if options.rope_scaling is not None:
        arguments["rope_scaling_type"] = _SCALINGS[options.rope_scaling]
    if ggml_type_named(options.cache_type_v).quantized and not options.flash_attn:
        raise UsageError(
            f"--cache-type-v {options.cache_type_v} needs flash attention in llama.cpp",
            "add --flash-attn on",
        )
    if options.lora:
        arguments["lora_path"], arguments["lora_scale"] = _lora(options.lora)
    try:
        return llama_cpp.Llama(str(path), **arguments)
    except Exception as error:  # a chat template may fail, too: it is a program of its author
        if "lora" in str(error).lower():
            raise EngineError(str(error), "check the --lora file and its base model") from error
        raise _broken(path) from error


def physical_cores() -> int:
    """Cores, not hyperthreads, that this process may use: prefill gains nothing from the latter."""
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    siblings = set()
    for cpu in allowed:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            siblings.add(topology.read_text())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def _trained_context(metadata: dict[str, str]) -> int:
    """The model's own context length; the vocabulary alone does not answer n_ctx_train()."""
    architecture = metadata.get("general.architecture", "")
    return int(metadata.get(f"{architecture}.context_length", 0))


def _lora(value: str) -> tuple[str, float]:
    path, _, scale = value.rpartition(":")
    try:
        found = (path, float(scale)) if path else (value, 1.0)
    except ValueError:
        found = (value, 1.0)
    if not Path(found[0]).is_file():
        raise NotFound(f"no LoRA file {found[0]}", "give --lora FILE or --lora FILE:SCALE")
    return found


def _broken(path: Path) -> EngineError:
    return EngineError(
        f"llama.cpp cannot load {path}",
        "the file may be cut or of a newer architecture, or memory too small for --ctx",
    )
