"""Metrics of this process for Prometheus: `kvsnap.metrics`.

    kvsnap.metrics.register()        # the application's own endpoint exposes them from now on
    print(kvsnap.metrics.text())     # or where there is none

They are counted in any case, from the first use of a store on; prometheus-client is loaded and needed
by these functions only. A forked child counts from 0 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store

if TYPE_CHECKING:
    from types import ModuleType

    from prometheus_client.registry import Collector, CollectorRegistry

__all__ = ["collector", "register", "store_text", "text"]


def collector() -> Collector:
    """What a `prometheus_client.CollectorRegistry` takes. Raises `Unsupported` without that
    package."""
    made: Collector = _exposition().OfProcess()
    return made


def register(registry: CollectorRegistry | None = None) -> Collector:
    """Let a registry (None: the default one of prometheus_client) expose them. Returns the collector,
    for `registry.unregister`. Raises `UsageError` where it does already."""
    own = collector()
    if registry is None:
        from prometheus_client import REGISTRY

        registry = REGISTRY
    try:
        registry.register(own)
    except ValueError as error:
        raise UsageError(
            "this registry has kvsnap's metrics already", "register them once in a process"
        ) from error
    return own


def text() -> str:
    """Prometheus' text format."""
    module = _exposition()
    return str(module.text_of(module.OfProcess()))


def store_text(store: Store) -> str:
    """A store at rest in Prometheus' text format: what `kvsnap stats --prometheus` prints."""
    module = _exposition()
    return str(module.text_of(module.OfStore(str(store.path), stats(store))))


def _exposition() -> ModuleType:
    try:
        from kvsnap.kvstore import exposition
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"metrics need the package {error.name}", "pip install 'kvsnap[remote]'"
        ) from error
    return exposition
