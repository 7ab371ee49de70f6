"""Whether the engines that are installed here fit: one look at each, by name, for `kvsnap doctor`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvsnap.formats.interchange.llamacpp import SUPPORTED_VERSIONS

Found = list[tuple[str, str, str]]
"""(level: ok, note or problem; what; advice)."""


def installed(engine: str) -> Found:
    """Raises KeyError for an engine that is not in `CHECKS`."""
    return CHECKS[engine]()


def _llama() -> Found:
    try:
        import llama_cpp
    except ImportError:
        advice = "pip install 'kvsnap[llama]'"
        return [("note", "engine llama.cpp: llama-cpp-python is not installed", advice)]
    except OSError as error:
        return [("problem", f"engine llama.cpp cannot be loaded: {error}", "reinstall it")]
    version = getattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", None)
    name = f"engine llama.cpp: llama-cpp-python {llama_cpp.__version__}, state version {version}"
    if version in SUPPORTED_VERSIONS:
        return [("ok", name, "")]
    known = ", ".join(map(str, SUPPORTED_VERSIONS))
    return [("problem", f"{name}; kvsnap knows {known}", "use another version of either")]


def _transformers() -> Found:
    try:
        import transformers

        import_module("kvsnap.engines.transformers")
    except ImportError as error:
        advice = "pip install 'kvsnap[hf]'"
        return [("note", f"engine transformers: it cannot be imported: {error}", advice)]
    return [("ok", f"engine transformers: {transformers.__version__}", "")]


def _vllm() -> Found:
    from kvsnap.engines.vllm_check import findings

    return findings()


def _sglang() -> Found:
    from kvsnap.engines.sglang_check import findings

    return findings()


CHECKS: dict[str, Callable[[], Found]] = {
    "llama.cpp": _llama,
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}
