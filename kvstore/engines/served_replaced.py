"""Weights that are replaced in a running server: nothing of the store belongs to them any more.

Serving engines flush their own caches then, and do not tell their plugins. The digest of the model's
files says nothing of weights that came over the network, so a process whose weights were replaced
neither stores nor restores from then on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvsnap.formats.errors import Unsupported

_log = logging.getLogger("kvsnap")
_replaced_by: list[str] = []


def weights_replaced() -> bool:
    """Whether a method that is watched was called in this process."""
    return bool(_replaced_by)


def watch(
    owner: Any, methods: Sequence[str], replaces: Callable[..., bool] = lambda *args, **kwargs: True
) -> None:
    """From now on notice when methods of this class, by which weights come into a running model, are
    called, with arguments of which `replaces` says so. Raises `Unsupported` where it has no such
    methods: then nobody would notice."""
    missing = [name for name in methods if not callable(getattr(owner, name, None))]
    if missing:
        raise Unsupported(
            f"{owner.__module__}.{owner.__name__} has no {', '.join(missing)}",
            "kvsnap must notice when weights are replaced; use a release that it knows",
        )
    for name in methods:
        method = getattr(owner, name)
        if not hasattr(method, "_kvsnap_watches"):
            setattr(owner, name, _noticed(name, method, replaces))


def _noticed(
    name: str, method: Callable[..., Any], replaces: Callable[..., bool]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def noticing(*args: Any, **kwargs: Any) -> Any:
        if not replaces(*args, **kwargs):
            return method(*args, **kwargs)
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
