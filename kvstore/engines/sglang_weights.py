"""Weights that are replaced in a running SGLang: nothing of the store belongs to them any more.

SGLang flushes its own caches then, and does not tell the storage. The digest of the model's files says
nothing about weights that came over the network, so a process whose weights were replaced neither
stores nor restores from then on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from kvsnap.formats.errors import Unsupported

REPLACING = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)
"""Methods of SGLang's `WeightUpdater` by which weights come into a running model."""

_log = logging.getLogger("kvsnap")
_replaced_by: list[str] = []


def weights_replaced() -> bool:
    return bool(_replaced_by)


def watch() -> None:
    """From now on notice when this process replaces its weights. Raises `Unsupported` where SGLang
    has no such methods: then nobody would notice."""
    try:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    except ImportError as error:
        raise Unsupported(
            f"SGLang's WeightUpdater cannot be imported: {error}",
            "kvsnap must notice when weights are replaced; use a release that it knows",
        ) from error
    watch_class(WeightUpdater)


def watch_class(updater: Any) -> None:
    """Wrap the methods of a class, once."""
    missing = [name for name in REPLACING if not callable(getattr(updater, name, None))]
    if missing:
        raise Unsupported(
            f"SGLang's WeightUpdater has no {', '.join(missing)}",
            "kvsnap must notice when weights are replaced; use a release that it knows",
        )
    for name in REPLACING:
        method = getattr(updater, name)
        if not hasattr(method, "_kvsnap_watches"):
            setattr(updater, name, _noticed(name, method))


def _noticed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noticing(*args: Any, **kwargs: Any) -> Any:
        if not _replaced_by:
            _log.warning(
                "kvsnap: %s replaces the weights of this process: nothing is stored or restored any"
                " more; start the engine anew with the new weights to use the store again",
                name,
            )
        _replaced_by.append(name)
        return method(*args, **kwargs)

    noticing._kvsnap_watches = True  # type: ignore[attr-defined]
    return noticing
