"""The methods of SGLang by which weights come into a running model; see served_replaced.py."""

from __future__ import annotations

from kvsnap.engines import served_replaced
from kvsnap.formats.errors import Unsupported

REPLACING = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
)
"""Of its `WeightUpdater`."""


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
    served_replaced.watch(WeightUpdater, REPLACING)
