"""Counts in Prometheus' form. The one module that imports prometheus_client: see metrics.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from kvsnap.kvstore.counting import SECONDS, Counter, Histogram
from kvsnap.kvstore.events import METRICS
from kvsnap.kvstore.stats import Stats

STORE = "kvsnap_store_"
_BOUNDS = (*(str(bound) for bound in SECONDS), "+Inf")
_Values = float | dict[str, int]
_Family = GaugeMetricFamily | CounterMetricFamily


class OfProcess:
    """A collector of what this process counted. Reading never waits for the store."""

    def collect(self) -> Iterator[Metric]:
        for metric in METRICS:
            yield _histogram(metric) if isinstance(metric, Histogram) else _counter(metric)

    def describe(self) -> Iterator[Metric]:
        """The same: names are taken when it is registered, and two of it are refused."""
        return self.collect()


@dataclass(frozen=True)
class OfStore:
    """A store at rest. Each series says which store (`path`), so that several of one machine go
    together."""

    path: str
    stats: Stats

    def collect(self) -> Iterator[Metric]:
        found = self.stats
        budget = math.inf if found.budget_bytes is None else found.budget_bytes
        # None in what a tenant is told; this is for whoever runs the store.
        tokens = {"reused": found.reused_tokens or 0, "computed": found.computed_tokens or 0}
        yield self._gauge("blocks", "Blocks whose files are there.", found.codecs, "codec")
        yield self._gauge("state_checkpoints", "State checkpoints that are there.", found.states)
        yield self._gauge(
            "unreachable_blocks", "Intact blocks behind a missing one.", found.unreachable
        )
        yield self._gauge("size_bytes", "Bytes of all files that the budget counts.", found.bytes)
        yield self._gauge("budget_bytes", "Bytes that the store may take; +Inf: no limit.", budget)
        yield self._gauge(
            "min_free_bytes", "Bytes to leave free on the disk.", found.min_free_bytes
        )
        yield self._gauge(
            "sharing_saved_bytes",
            "Bytes that all stored chains would take more if none shared a block.",
            found.bytes_saved_by_sharing,
        )
        yield self._gauge("sessions", "Session files.", found.sessions)
        yield self._gauge("pins", "Pins of sessions and blocks.", found.pinned)
        yield self._gauge("leases", "Calls that hold blocks at this moment.", found.leased)
        yield self._gauge("models", "Models and settings that have blocks.", found.models)
        yield self._counter("resumes_total", "Prompts resumed by any process.", found.requests or 0)
        yield self._counter("prompt_tokens_total", "Tokens of these prompts.", tokens, "source")
        yield self._counter(
            "evicted_blocks_total",
            "Blocks and state checkpoints deleted to make room, by any process.",
            found.evicted_blocks or 0,
        )

    def _gauge(self, name: str, text: str, values: _Values, *label: str) -> Metric:
        return self._filled(GaugeMetricFamily(STORE + name, text, labels=("store", *label)), values)

    def _counter(self, name: str, text: str, values: _Values, *label: str) -> Metric:
        text += " From 0 again where the index was built anew."
        family = CounterMetricFamily(STORE + name, text, labels=("store", *label))
        return self._filled(family, values)

    def _filled(self, family: _Family, values: _Values) -> Metric:
        store = self.path.encode("utf-8", "replace").decode()  # a path is any bytes
        if isinstance(values, dict):
            for value_of_label, value in sorted(values.items()):
                family.add_metric((store, value_of_label), value)
        else:
            family.add_metric((store,), values)
        return family


def text_of(collector: OfProcess | OfStore) -> str:
    """Prometheus' text format, version 0.0.4."""
    return generate_latest(collector).decode("utf-8")


def _counter(metric: Counter) -> CounterMetricFamily:
    made = CounterMetricFamily(metric.name, metric.text, labels=metric.labels)
    for series, value in sorted(metric.read().items()):
        made.add_metric(series, value)
    return made


def _histogram(metric: Histogram) -> HistogramMetricFamily:
    made = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
    for series, seen in sorted(metric.read().items()):
        made.add_metric(series, list(zip(_BOUNDS, seen.counts, strict=True)), seen.sum)
    return made
