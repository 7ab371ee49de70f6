"""What vLLM counts of the connector, through its own hooks: the log line and Prometheus."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

COUNTED = {
    "loaded": ("vllm:kvsnap_loaded_blocks", "Blocks restored from the store."),
    "loaded_tokens": ("vllm:kvsnap_loaded_tokens", "Tokens of these blocks, on each rank."),
    "loaded_bytes": ("vllm:kvsnap_loaded_bytes", "Bytes of their rows."),
    "load_seconds": (
        "vllm:kvsnap_load_seconds",
        "Time that loads took, beside the engine's steps.",
    ),
    "load_failures": (
        "vllm:kvsnap_load_failures",
        "Blocks that could not be used, so that they and what followed was computed.",
    ),
    "written": ("vllm:kvsnap_stored_blocks", "Blocks written to the store."),
    "written_bytes": ("vllm:kvsnap_stored_bytes", "Bytes of their files."),
    "dropped": (
        "vllm:kvsnap_dropped_blocks",
        "Filled blocks that were not stored: no room to wait, a full store, or an error.",
    ),
}
"""Key → name and help of the counter. vLLM adds up what its ranks count."""


class KVSnapStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: keys of `COUNTED` → numbers since the last time."""

    data: dict[str, int | float]

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvsnap {key}": round(value, 3) for key, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class KVSnapPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each of `COUNTED` and engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        labels = self._labelnames
        self._counters = {
            key: {
                engine: counter.labels(*values)
                for engine, values in self.per_engine_labelvalues.items()
            }
            for key, (name, text) in COUNTED.items()
            for counter in [self._counter_cls(name=name, documentation=text, labelnames=labels)]
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            self._counters[key][engine_idx].inc(value)
