"""`kvsnap bench codecs` and `calibrate` from outside, with little work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
WORDS = "A library lends books to people who bring them back. It is open on five days a week. "


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.txt").write_text(WORDS * 12)
    (folder / "two.md").write_text("# Rules\n" + WORDS * 12)
    (folder / "short.txt").write_text(WORDS)
    return folder


def test_it_measures_on_any_model_and_texts(
    kvsnap: Any, model: Path, texts: Path, tmp_path: Path
) -> None:
    arguments = [
        "bench", "codecs", "--model", model, "--texts", texts, "--engine", "llama.cpp",
        "--context", 128, "--tokens", 16, "--codec", "zstd", "--codec", "q8", "--codec", "q4;step=1",
    ]  # fmt: skip
    done = kvsnap("--json", *arguments)
    assert done.code == 0, done.err
    found = done.json
    assert found["texts"] == ["one", "two"]
    assert list(found["skipped"]) == ["short"]
    exact, fine, coarse = found["results"]
    assert exact["loss"]["kl_mean"] == 0
    assert exact["loss"]["top1"] == 1
    assert 1 < exact["loss"]["ratio"] < fine["loss"]["ratio"] < coarse["loss"]["ratio"]
    assert coarse["loss"]["kl_mean"] > 0
    picture = tmp_path / "codecs.svg"
    done = kvsnap(*arguments, "--plot", picture)
    assert done.code == 0
    assert "short is left out" in done.err
    assert "q4@1;step=1.0" in done.out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--codec", "lz4"], 2, "known codecs"),
        (["--codec", "kvtc"], 1, "kvsnap calibrate"),
        (["--plot", "codecs.jpg"], 2, "neither .png nor .svg"),
        (["--outliers"], 2, "--engine"),
        (["--context", "100000"], 2, "no text has"),
    ],
)
def test_what_cannot_be_measured_is_told_in_two_lines(
    kvsnap: Any, model: Path, texts: Path, arguments: list[str], code: int, told: str
) -> None:
    done = kvsnap(
        "bench", "codecs", "--model", model, "--texts", texts, "--engine", "llama.cpp", *arguments
    )
    assert done.code == code, done.err
    assert told in done.err
    lines = [line for line in done.err.splitlines() if not line.startswith("warning")]
    assert len(lines) == 2


@pytest.mark.parametrize("command", [["bench", "codecs"], ["calibrate"]])
def test_without_transformers_it_says_what_to_install(
    kvsnap: Any, model: Path, tmp_path: Path, command: list[str]
) -> None:
    folder = tmp_path / "hidden"
    folder.mkdir()
    (folder / "transformers.py").write_text("raise ImportError('no', name='transformers')\n")
    done = kvsnap(*command, "--model", model, PYTHONPATH=str(folder))
    assert done.code == 1
    assert "transformers, which is not installed" in done.err
    assert "pip install 'kvsnap[hf]'" in done.err


def test_a_file_that_is_no_model_is_told(kvsnap: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    for command in (["bench", "codecs"], ["calibrate"]):
        done = kvsnap(*command, "--model", path)
        assert done.code == 1
        assert "cannot load m.gguf" in done.err
        assert kvsnap(*command, "--model", tmp_path / "none.gguf").code == 1
