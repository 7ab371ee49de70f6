"""`kvsnap bench store`: what it prints, what it leaves, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIELDS = {
    "blocks", "sessions", "long_chain", "bytes", "prompt_tokens", "how_built", "build_seconds",
    "rebuild_seconds", "rebuild_peak_bytes", "index_bytes", "timings", "peak_bytes", "folder",
}  # fmt: skip
TIMINGS = {
    "open", "look_up_all", "look_up_half", "look_up_none", "search_all", "search_half",
    "search_none", "put", "put_full", "evict", "stats", "ls", "plan", "gc",
}  # fmt: skip


def test_it_measures_a_store_and_removes_it(kvsnap: Any, store: Path) -> None:
    found = kvsnap("bench", "store", "--blocks", 300, "--json").json
    assert found.keys() == FIELDS
    assert found["timings"].keys() == TIMINGS
    for timing in found["timings"].values():
        assert 0 < timing["median"] <= timing["p95"]
        assert timing["count"] > 0
    assert (found["blocks"], found["long_chain"], found["prompt_tokens"]) == (300, 150, 9600)
    assert found["sessions"] > 0
    assert 300 * 300 < found["index_bytes"] < 300 * 2000
    assert found["folder"] is None
    assert not store.exists()
    assert list(store.parent.iterdir()) == []


def test_what_is_kept_is_a_store_that_passes_verify(
    kvsnap: Any, store: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    done = kvsnap("bench", "store", "--blocks", 40, "--keep", kept)
    assert done.code == 0
    assert "put of one block" in done.out
    assert "written under their final names" in done.out
    checked = kvsnap("--store", kept, "verify", "--json").json
    assert checked["bad"] == []
    assert checked["checked"] > 20
    assert kvsnap("--store", kept, "stats", "--json").json["blocks"] > 20
    assert not store.exists()


def test_a_folder_with_anything_in_it_is_refused(kvsnap: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    done = kvsnap("bench", "store", "--blocks", 40, "--keep", folder)
    assert done.code == 2
    assert "not an empty folder" in done.err
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_more_than_the_disk_holds_is_refused_before_anything_is_written(
    kvsnap: Any, tmp_path: Path
) -> None:
    done = kvsnap("bench", "store", "--blocks", 10**8, "--keep", tmp_path / "kept")
    assert done.code == 1
    assert "--blocks" in done.err
    assert not (tmp_path / "kept").exists()


def test_no_blocks_at_all_are_a_usage_error(kvsnap: Any) -> None:
    done = kvsnap("bench", "store", "--blocks", 0)
    assert done.code == 2
    assert "--blocks" in done.err
