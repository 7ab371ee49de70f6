"""`kvsnap explain` on the bundled model: both sides of the break as text, and no trace of others."""

from __future__ import annotations

import json
import re
import secrets
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

IDS = list(range(3000, 3150))
"""Two blocks and a tail of 22."""
PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def fields(section: str) -> set[str]:
    found = re.search(rf"^### {section}\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    rows = re.search(r"\| field .*?\n((?:\|.*\n)+)", found[1])
    assert rows
    firsts = [row.split("|")[1] for row in rows[1].splitlines()]
    return {name for first in firsts for name in re.findall(r"`(\w+)`", first)}


@pytest.fixture
def prompt(tmp_path: Path) -> Any:
    """A file of token ids."""

    def write(ids: list[int]) -> Path:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(ids))
        return path

    return write


@pytest.fixture
def explain(kvsnap: Any, model: Path, prompt: Any) -> Any:
    done = kvsnap("save", "--model", model, "--token-ids", prompt(IDS), "--session", "s")
    assert done.code == 0, done.err
    return lambda *arguments: kvsnap("explain", "--model", model, *arguments)


def test_the_break_is_shown_with_ids_and_text_of_both_sides(explain: Any, prompt: Any) -> None:
    asked = prompt([*IDS[:100], 504, *IDS[101:]])
    found = explain("--json", "--token-ids", asked).json
    assert found.keys() == fields("explain")
    assert (found["verdict"], found["matched_tokens"], found["reused_tokens"]) == (
        "differing token", 100, 100,
    )  # fmt: skip
    assert [(b["start"], b["tokens"]) for b in found["blocks"]] == [(0, 64), (64, 36)]
    parting = found["differing_token"]
    assert (parting["position"], parting["token_id"], parting["stored_token_id"]) == (
        100, 504, IDS[100],
    )  # fmt: skip
    assert parting["text"]
    assert parting["stored_text"]
    assert parting["text"] != parting["stored_text"]
    done = explain("--token-ids", asked)
    lines = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in done.out.splitlines())
    assert lines["here"].startswith(f"504 {parting['text']!r} then ")
    assert lines["stored"].startswith(f"{IDS[100]} {parting['stored_text']!r} then ")
    assert lines["resume"] == "restores 100, computes 50"
    assert lines["ends"].startswith("differing token: position 100 ")


def test_the_next_turn_of_a_session_is_explained_as_a_resume_finds_it(
    explain: Any, kvsnap: Any, model: Path, store: Path
) -> None:
    before = {path: path.read_bytes() for path in store.rglob("*.safetensors")}
    turn = ["s", "--prompt", " and then?"]
    found = explain("--json", *turn).json
    assert (found["verdict"], found["session"]) == ("end of stored chain", "s")
    assert found["text"] == "session 's' ends there"
    assert (found["matched_tokens"], found["tail_tokens"]) == (150, 22)
    alone = explain("--json", "s").json
    assert (alone["verdict"], alone["prompt_tokens"]) == ("whole prompt", 150)
    assert before == {path: path.read_bytes() for path in store.rglob("*.safetensors")}
    assert kvsnap("--json", "stats").json["requests"] == 1, "the save's own"
    resumed = kvsnap("--json", "resume", "--model", model, *turn, "--max-tokens", 1, "--no-save")
    assert resumed.json["reused_tokens"] == found["reused_tokens"]
    assert resumed.json["prompt_tokens"] == found["prompt_tokens"]


def test_a_setting_and_damage_are_named_and_a_missing_session_is_an_error(
    explain: Any, kvsnap: Any, store: Path
) -> None:
    other = explain("--json", "s", "--cache-type-k", "f32").json
    assert other["verdict"] == "identity"
    assert other["identity"] == {
        "field": "kv_types.full.k", "here": '"f32"', "stored": '"f16"',
        "stored_in": "session 's'",
    }  # fmt: skip
    second = kvsnap("--json", "show", "s").json["blocks"][1]["name"]
    path = store / "blocks" / second[:2] / f"{second}.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    assert explain("--json", "s").json["verdict"] == "whole prompt"
    checked = explain("--json", "s", "--check").json
    assert (checked["verdict"], checked["matched_tokens"], checked["block"]) == (
        "damaged", 64, second,
    )  # fmt: skip
    assert path.read_bytes() == data, "nothing is moved"
    missing = explain("nobody")
    assert (missing.code, missing.err.splitlines()[0]) == (
        1, "error: no session 'nobody' in the store",
    )  # fmt: skip
    assert explain().code == 2


def test_without_the_key_a_stored_prompt_is_explained_like_a_new_one(
    kvsnap: Any, model: Path, prompt: Any, tmp_path: Path
) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    for file in (key, other):
        file.write_text(secrets.token_hex(32))
    with_key = ["--tenant-key-file", key]
    kvsnap("save", "--model", model, "--token-ids", prompt(IDS), "--session", "s", *with_key)
    never_seen = prompt([7, *IDS[1:]])
    asked = ["explain", "--model", model, "--token-ids"]
    assert kvsnap(*asked, prompt(IDS), *with_key).out.count("2 blocks") == 1
    for tenant in ([], ["--tenant-key-file", other]):
        answers = [kvsnap(*asked, path, *tenant) for path in (prompt(IDS), never_seen)]
        assert answers[0] == answers[1]
        assert "nothing stored" in answers[0].out
        assert kvsnap("explain", "s", "--model", model, *tenant).code == 1


def test_show_tree_lists_the_fields_of_the_page_and_draws_the_sessions(
    explain: Any, kvsnap: Any
) -> None:
    del explain  # it has saved a session
    found = kvsnap("--json", "show", "--tree").json
    assert found.keys() == {"nodes", "omitted"}
    (node,) = found["nodes"]
    assert node.keys() == fields("show --tree")
    assert (node["blocks"], node["sessions"], node["on_path"]) == (2, ["s"], False)
    assert re.match(
        r"0–127  2 blocks, .* never reused  [0-9a-f]{12}  s", kvsnap("show", "--tree").out
    )
    assert kvsnap("show", "s", "--tree").out.startswith("* 0–127 ")
    assert kvsnap("show").code == 2
    assert kvsnap("show", "nobody", "--tree").code == 1
