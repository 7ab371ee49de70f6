"""`kvsnap stats --prometheus`: a store at rest, for node_exporter's textfile collector."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Run = Callable[..., Any]
IDS = some_ids(57)


def fill(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = {"block_size": 16, "created": 1, "format": "1"}
    (path / "kvsnap.json").write_text(json.dumps(settings))
    with Store(path) as store:
        turn(store, StampedEngine(), IDS, "s", codec="raw")
        turn(store, StampedEngine(), IDS, "t", codec="raw")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but `store`) → value."""
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "store")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_it_says_what_the_json_says(kvsnap: Run, store: Path) -> None:
    fill(store)
    found, known = samples(kvsnap("stats", "--prometheus").out), kvsnap("--json", "stats").json
    assert found == {
        ("kvsnap_store_blocks", "raw"): 3,
        ("kvsnap_store_state_checkpoints",): known["states"],
        ("kvsnap_store_unreachable_blocks",): known["unreachable"],
        ("kvsnap_store_size_bytes",): known["bytes"],
        ("kvsnap_store_budget_bytes",): known["budget_bytes"],
        ("kvsnap_store_min_free_bytes",): known["min_free_bytes"],
        ("kvsnap_store_sharing_saved_bytes",): known["bytes_saved_by_sharing"],
        ("kvsnap_store_sessions",): 2,
        ("kvsnap_store_pins",): known["pinned"],
        ("kvsnap_store_leases",): known["leased"],
        ("kvsnap_store_models",): 1,
        ("kvsnap_store_resumes_total",): 2,
        ("kvsnap_store_prompt_tokens_total", "computed"): known["computed_tokens"],
        ("kvsnap_store_prompt_tokens_total", "reused"): known["reused_tokens"],
        ("kvsnap_store_evicted_blocks_total",): 0,
    }
    assert known["reused_tokens"] == 48


def test_every_series_names_its_store_whatever_the_path(kvsnap: Run, tmp_path: Path) -> None:
    path = tmp_path / 'a "quoted" \\ back\nslash'
    fill(path)
    text = kvsnap("stats", "--prometheus", "--store", path).out
    stores = {
        sample.labels["store"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert stores == {str(path)}
    for line in text.splitlines():
        assert line.startswith(("# HELP kvsnap_store_", "# TYPE kvsnap_store_", "kvsnap_store_"))


def test_an_empty_store_without_a_limit_has_an_infinite_budget(kvsnap: Run) -> None:
    done = kvsnap("stats", "--prometheus", "--capacity", "unlimited")
    assert done.code == 0
    assert samples(done.out)["kvsnap_store_budget_bytes",] == float("inf")
    assert samples(done.out)["kvsnap_store_resumes_total",] == 0


def test_it_is_not_json_as_well(kvsnap: Run) -> None:
    done = kvsnap("--json", "stats", "--prometheus")
    assert done.code == 2
    assert done.out == ""
    assert done.err.splitlines() == [
        "error: --prometheus and --json exclude each other",
        "  give one of them",
    ]


def test_without_the_package_it_says_what_to_install(kvsnap: Run, tmp_path: Path) -> None:
    (tmp_path / "missing" / "prometheus_client").mkdir(parents=True)
    package = tmp_path / "missing" / "prometheus_client" / "__init__.py"
    package.write_text("raise ModuleNotFoundError(name='prometheus_client')")
    done = kvsnap("stats", "--prometheus", PYTHONPATH=str(tmp_path / "missing"))
    assert done.code == 1
    assert done.out == ""
    assert done.err.splitlines() == [
        "error: metrics need the package prometheus_client",
        "  pip install 'kvsnap[remote]'",
    ]
    assert kvsnap("stats", PYTHONPATH=str(tmp_path / "missing")).code == 0
