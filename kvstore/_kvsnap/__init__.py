"""kvsnap: filled KV blocks on disk, named by their chained hash, in front of any engine.

    store = kvsnap.Store("~/.cache/kvsnap")
    engine = kvsnap.engines.LlamaCpp(llm)
    session = kvsnap.Session(store, engine, "alice/42")
    report = session.resume(token_ids)   # the longest stored prefix is in the engine now
    ...                                  # generate as ever
    session.save()                       # only new blocks are written

Nothing here is imported before it is used: `import kvsnap` loads neither torch nor an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsnap import engines
    from kvsnap.engines.llama_cache import LlamaCache
    from kvsnap.formats.errors import KvsnapError
    from kvsnap.formats.tenant import Tenant
    from kvsnap.kvstore import metrics
    from kvsnap.kvstore.reports import ResumeReport, SaveReport
    from kvsnap.kvstore.session import Session
    from kvsnap.kvstore.store import Store

__version__ = "0.1.0"

_EXPORTS = {
    "KvsnapError": "kvsnap.formats.errors",
    "LlamaCache": "kvsnap.engines.llama_cache",
    "ResumeReport": "kvsnap.kvstore.reports",
    "SaveReport": "kvsnap.kvstore.reports",
    "Session": "kvsnap.kvstore.session",
    "Store": "kvsnap.kvstore.store",
    "Tenant": "kvsnap.formats.tenant",
}

_MODULES = {"engines": "kvsnap.engines", "metrics": "kvsnap.kvstore.metrics"}

__all__ = [
    "KvsnapError",
    "LlamaCache",
    "ResumeReport",
    "SaveReport",
    "Session",
    "Store",
    "Tenant",
    "engines",
    "metrics",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'kvsnap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
