"""Prometheus text, read and linted: what a scrape would take, and what it would complain about."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
_NAME = re.compile(r"kvsnap_[a-z][a-z0-9]*(_[a-z0-9]+)*")
_UNITS = re.compile(
    r"_(ms|millis\w*|micros\w*|nanos\w*|minutes|hours|kb|mb|gb|kilo\w*|mega\w*|percent)(_|$)"
)


def series(text: str) -> dict[tuple[str, Labels], float]:
    """(sample, labels) → value. Raises `AssertionError` where one comes twice."""
    found: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    return series(text)[name, frozenset(labels.items())]


def types(text: str) -> dict[str, str]:
    """Name → type, as the TYPE lines say."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def labels_of(text: str) -> Mapping[str, set[str]]:
    """Family → names of its labels, of what has series; `le` is the format's own."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        name = family.name + "_total" * (family.type == "counter")
        for sample in family.samples:
            found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    return found


def assert_clean(text: str) -> None:
    """What `promtool check metrics` looks at, and that nothing comes twice."""
    kinds = types(text)
    helps = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    assert kinds
    assert text.endswith("\n")
    assert list(helps) == list(kinds)
    assert len(re.findall(r"^# TYPE ", text, re.MULTILINE)) == len(kinds)
    for name, kind in kinds.items():
        assert _NAME.fullmatch(name), name
        assert not _UNITS.search(name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert kind != "gauge" or not re.search(r"_(count|sum|bucket|info)$", name), name
        assert not re.search(r"_(counter|gauge|histogram)(_|$)", name), name
        assert helps[name].endswith("."), name
    for (name, labels), amount in series(text).items():
        assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label, _ in labels), name
        assert amount >= 0, name


def assert_grown(before: str, after: str) -> None:
    """No series of a counter or histogram went, and none went back."""
    kinds = types(after)
    later = series(after)
    for (name, labels), amount in series(before).items():
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if kinds.get(name) == "counter" or kinds.get(family) == "histogram":
            assert later[name, labels] >= amount, name
