"""Engine adapters: the only code that touches an engine. One table; each is imported on use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvsnap.formats.errors import Unsupported

ENGINES = {
    "llama.cpp": "kvsnap.engines.llamacpp:LlamaCpp",
    "transformers": "kvsnap.engines.transformers:Transformers",
}
"""Name on the command line → adapter class."""

_EXPORTS = {
    "Engine": "kvsnap.engines.base:Engine",
    "LlamaCpp": ENGINES["llama.cpp"],
    "Transformers": ENGINES["transformers"],
}

__all__ = ["ENGINES", "Engine", "LlamaCpp", "Transformers", "get_engine"]


def get_engine(name: str) -> Any:
    """The adapter class of an engine's name."""
    if name not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise Unsupported(f"engine {name!r} is not known", f"known engines: {known}")
    return _load(ENGINES[name])


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(name)
    return _load(_EXPORTS[name])
