"""A model's files that changed under a running server: their digest is not that of what it serves."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvsnap.engines import sglang_files
from kvsnap.engines.sglang_files import check_still_loaded, process_start_ns
from kvsnap.formats.errors import NotFound, Unsupported


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a process that has attached nothing."""
    monkeypatch.setattr(sglang_files, "_loaded", {})
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def began(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_files, "process_start_ns", lambda: at)


def test_this_process_began_a_while_ago() -> None:
    age = time.time_ns() - process_start_ns()
    assert 0 < age < 24 * 3600 * 10**9


def test_files_from_before_the_process_began_are_those_it_loaded(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began(weights.stat().st_ctime_ns + 1, monkeypatch)
    check_still_loaded(weights.parent, starting=False)
    check_still_loaded(weights.parent, starting=False)
    check_still_loaded(weights, starting=False)


def test_files_that_changed_since_are_refused_when_a_store_is_attached_later(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began(weights.stat().st_ctime_ns - 1, monkeypatch)
    with pytest.raises(Unsupported, match=r"model\.safetensors changed after this process"):
        check_still_loaded(weights.parent, starting=False)


def test_files_that_were_downloaded_at_start_pass_and_may_not_change_then(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began(weights.stat().st_ctime_ns - 1, monkeypatch)
    check_still_loaded(weights.parent, starting=True)
    check_still_loaded(weights.parent, starting=False)
    weights.write_bytes(b"WEIGHTS")
    for starting in (False, True):
        with pytest.raises(Unsupported, match="changed after this process"):
            check_still_loaded(weights.parent, starting=starting)


def test_another_model_than_the_one_that_was_loaded_is_refused(
    weights: Path, tmp_path: Path
) -> None:
    check_still_loaded(weights.parent, starting=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(Unsupported, match="changed after this process"):
        check_still_loaded(other, starting=False)


def test_a_folder_that_is_not_there_is_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        check_still_loaded(tmp_path / "nowhere", starting=True)
