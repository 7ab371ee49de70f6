"""Lossy codecs on the command line: chosen on purpose, told at resume, never mixed with exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
Q8 = "q8@1"


@pytest.fixture
def lossy(kvsnap: Any, model: Path, chat: Path) -> Any:
    done = kvsnap(
        "--json", "save", "--model", model, "--messages", chat, "--session", "s", "--codec", "q8"
    )
    assert done.code == 0, done.err
    return done.json


def test_a_lossy_save_says_what_it_did(lossy: Any) -> None:
    assert (lossy["codec"], lossy["fidelity"]) == ("q8", Q8)
    assert lossy["blocks_written"] == lossy["blocks"] > 0
    assert lossy["bytes_raw"] > 1.8 * lossy["bytes_written"]


def test_its_session_resumes_lossy_and_says_so(kvsnap: Any, model: Path, lossy: Any) -> None:
    done = kvsnap("resume", "s", "--model", model, "--prompt", "And today?", "--max-tokens", 2)
    assert done.code == 0
    assert f"reused ({Q8})" in done.err
    again = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 1).json
    assert again["fidelity"] == Q8
    assert again["reused_tokens"] > lossy["tokens"]
    shown = kvsnap("--json", "show", "s").json
    assert (shown["codec"], shown["fidelity"]) == ("zstd", Q8)
    assert {block["stored"] for block in shown["blocks"]} == {True}
    assert kvsnap("verify").code == 0


@pytest.mark.usefixtures("lossy")
def test_an_exact_prompt_misses_and_is_told_how_to_hit(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    prompt = ["--model", model, "--messages", chat, "--max-tokens", 1, "--no-save"]
    missed = kvsnap("--json", "resume", *prompt)
    assert (missed.json["reused_tokens"], missed.json["fidelity"]) == (0, "exact")
    assert "fidelity" in missed.json["reuse_stopped_by"]
    assert "--allow-lossy" in missed.err
    hit = kvsnap("--json", "resume", *prompt, "--allow-lossy").json
    assert hit["reused_tokens"] > 0
    assert hit["fidelity"] == Q8
    explained = kvsnap("--json", "explain", "--model", model, "--messages", chat).json
    assert explained["identity"]["field"] == "fidelity"


@pytest.mark.usefixtures("lossy")
def test_a_lossy_session_is_not_coded_again(kvsnap: Any) -> None:
    done = kvsnap("recompress", "s", "--codec", "q8")
    assert done.code == 2
    assert "one loss to another" in done.err


def test_an_exact_session_is_recompressed_without_a_model(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    saved = kvsnap("--json", "save", "--model", model, "--messages", chat, "--session", "s").json
    done = kvsnap("--json", "recompress", "s", "--codec", "q8")
    assert done.code == 0, done.err
    found = done.json
    assert found["bytes_before"] > 1.4 * found["bytes_after"]
    resumed = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 1).json
    assert resumed["fidelity"] == Q8
    assert resumed["reused_tokens"] == saved["tokens"]


def test_a_limit_on_kl_chooses_a_codec_and_is_kept_with_the_session(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    arguments = ["save", "--model", model, "--messages", chat, "--session", "s", "--max-kl"]
    done = kvsnap("--json", *arguments, "0.5")
    assert done.code == 0, done.err
    assert done.json["fidelity"] != "exact"
    assert "floor" in done.err
    told = kvsnap("--json", "show", "s").json["notes"]["max_kl"]
    assert told["limit"] == 0.5
    assert told["excess"] <= 0.5
    assert {tried["codec"] for tried in told["tried"]} >= {Q8}
    assert "floor" in kvsnap("show", "s").out


def test_where_no_codec_holds_the_limit_the_session_stays_exact(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    arguments = ["save", "--model", model, "--messages", chat, "--session", "s", "--max-kl"]
    done = kvsnap("--json", *arguments, "0")
    assert done.code == 0, done.err
    assert done.json["fidelity"] == "exact"
    told = kvsnap("--json", "show", "s").json["notes"]["max_kl"]
    assert len(told["tried"]) == 2
    assert all(tried["excess"] + tried["error"] > 0 for tried in told["tried"])


def test_rows_that_the_engine_quantized_itself_stay_as_they_are(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    arguments = ["save", "--model", model, "--messages", chat, "--cache-type-k", "q8_0"]
    assert kvsnap("--json", *arguments, "--max-kl", "1").json["fidelity"] == "exact"
    done = kvsnap(*arguments, "--codec", "q8")
    assert done.code == 1
    assert "cannot take plane" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--codec", "q8;bits=4"], "no parameter 'bits'"),
        (["--codec", "q8@2"], "version '2' of codec q8"),
        (["--codec", "lz4"], "known codecs"),
        (["--codec", "q8", "--max-kl", "1"], "not both"),
        (["--max-kl", "nan"], "give a number"),
    ],
)
def test_a_wrong_codec_is_a_usage_error_of_two_lines(
    kvsnap: Any, model: Path, chat: Path, arguments: list[str], told: str
) -> None:
    done = kvsnap("save", "--model", model, "--messages", chat, *arguments)
    assert done.code == 2
    assert told in done.err
    assert len(done.err.strip().splitlines()) == 2, done.err
