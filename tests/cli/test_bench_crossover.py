"""`kvsnap bench crossover`: what it prints, what it stores, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
FIELDS = {
    name
    for row in PAGE.partition("\n`bench crossover`:\n")[2]
    .partition("\n`bench store`:\n")[0]
    .splitlines()
    if row.startswith("| `")
    for name in re.findall(r"`(\w+)`", row.split("|")[1])
}


@pytest.mark.engine
def test_it_measures_prints_and_stores_what_resume_goes_by(
    kvsnap: Any, model: Path, store: Path
) -> None:
    done = kvsnap("bench", "crossover", "--model", model, "--lengths", "64,100", "--json")
    assert done.code == 0
    found = done.json
    assert found.keys() == FIELDS
    assert [row["tokens"] for row in found["lengths"]] == [64, 128]
    assert {"memory", "disk"} <= found["cheaper_from"].keys()
    for row in found["lengths"]:
        assert row["compute_seconds"] > 0
        assert row["restore_seconds"].keys() == found["cheaper_from"].keys()
        assert all(seconds > 0 for seconds in row["restore_seconds"].values())
    (record,) = json.loads((store / "kvsnap.json").read_text())["break_even"].values()
    assert record["model"] == found["model"] == model.name
    assert [tokens for tokens, _ in record["prefill"]] == [1, 64, 128]
    assert record["restore"].keys() == found["cheaper_from"].keys()
    assert not list(store.rglob("*.safetensors"))
    assert kvsnap("verify").code == 0


@pytest.mark.engine
def test_no_store_writes_nothing_and_the_table_has_every_length_and_tier(
    kvsnap: Any, model: Path, store: Path
) -> None:
    done = kvsnap(
        "--quiet", "bench", "crossover", "--model", model, "--lengths", "64", "--no-store"
    )
    assert (done.code, done.err) == (0, "")
    assert not (store / "kvsnap.json").exists()
    head, row, *rest = done.out.splitlines()
    assert head.startswith("tokens")
    assert "from memory" in head
    assert re.match(r" *64 .*ms.*\(\d.*x\)", row)
    assert all("restoring is " in line for line in rest)
    assert len(rest) == row.count("x)")


@pytest.mark.engine
def test_it_draws_what_it_measured(kvsnap: Any, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plot.svg"
    arguments = ["--lengths", "64,128", "--no-store", "--plot", plot]
    assert kvsnap("bench", "crossover", "--model", model, *arguments).code == 0
    assert "<svg" in plot.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", ""], "--lengths"),
        (["--lengths", "64,"], "--lengths"),
        (["--lengths", "64,x"], "--lengths"),
        (["--lengths", "0"], "--lengths"),
        (["--lengths", "-64"], "--lengths"),
        (["--lengths", ",".join(["64"] * 100)], "--lengths"),
        (["--plot", "plot.txt"], "neither .png nor .svg"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    kvsnap: Any, tmp_path: Path, arguments: list[str], says: str
) -> None:
    done = kvsnap("bench", "crossover", "--model", tmp_path / "m.gguf", *arguments)
    assert done.code == 2
    assert says in done.err
    assert len(done.err.splitlines()) == 2


def test_a_plot_that_could_not_be_drawn_is_refused_before_anything_is_measured(
    kvsnap: Any, tmp_path: Path
) -> None:
    plot = tmp_path / "none" / "plot.png"
    done = kvsnap("bench", "crossover", "--model", tmp_path / "m.gguf", "--plot", plot)
    assert done.code == 1
    assert "nothing can be written" in done.err


@pytest.mark.engine
def test_a_length_beyond_the_context_is_refused_with_what_to_do(kvsnap: Any, model: Path) -> None:
    arguments = ["--model", model, "--lengths", "64,2000", "--ctx", 512, "--no-store"]
    done = kvsnap("bench", "crossover", *arguments)
    assert done.code == 1
    assert "2048 tokens do not fit" in done.err


def test_global_options_stand_anywhere(kvsnap: Any) -> None:
    for arguments in (
        ["--json", "bench", "crossover"],
        ["bench", "--json", "crossover"],
        ["bench", "crossover", "--json"],
    ):
        done = kvsnap(*arguments, "--model", "none.gguf")
        assert (done.code, done.out) == (1, "")
        assert "no model file" in done.err


def test_without_a_name_or_with_a_wrong_one_it_says_what_there_is(kvsnap: Any) -> None:
    done = kvsnap("bench")
    assert done.code == 2
    assert "crossover" in done.err
    done = kvsnap("bench", "nothing")
    assert done.code == 2
    assert "nothing" in done.err
