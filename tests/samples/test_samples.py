"""The samples run as they stand, twice: the second time on what the first one stored."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

SAMPLES = Path(__file__).parents[2] / "samples"
Sample = Callable[..., str]


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Sample:
    """Run a sample on the bundled model; what it prints."""

    def run_it(name: str, *more: str, store: str = "store") -> str:
        command = [sys.executable, str(SAMPLES / name), str(model), *more]
        environment = {"KVSNAP_STORE": str(tmp_path / store), "PATH": ""}
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_it


def test_every_call_of_the_library(run: Sample) -> None:
    first = run("library.py").splitlines()
    words = ["resume", "save", "flush", "truncate", "branch", "edit"]
    assert [line.split(":")[0] for line in first] == words
    tokens = int(first[1].split()[1])
    assert first[0] == f"resume: 0 reused, {tokens} computed"
    assert first[1] == f"save: {tokens} tokens, {tokens // 64} blocks written"
    flushed = int(first[2].split()[1])
    assert first[2] == f"flush: {flushed} tokens are safe"
    assert tokens < flushed < tokens + 10
    assert first[3] == f"truncate: {tokens} tokens"
    assert first[4] == f"branch: {tokens - 20} tokens"
    assert first[5].startswith("edit: 70 of ")
    second = run("library.py").splitlines()
    assert second[0] == f"resume: {tokens - 1} reused, 1 computed"
    assert second[1] == f"save: {tokens} tokens, 0 blocks written"
    assert second[2:4] == first[2:4]
    assert "'rental/winter' is there already | choose another name" in second[4]
    assert second[5] == first[5]


def test_chats_of_an_asyncio_program_keep_apart_and_go_on(run: Sample) -> None:
    def reused(output: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"alice": [], "bob": []}
        for name, tokens in re.findall(
            r"^(alice|bob): .*\((\d+) tokens reused\)$", output, re.MULTILINE
        ):
            found[name].append(int(tokens))
        return found

    first, second = reused(run("async_chat.py")), reused(run("async_chat.py"))
    for name in ("alice", "bob"):
        assert len(first[name]) == len(second[name]) == 2
        turns = [*first[name], *second[name]]
        assert turns == sorted(set(turns))  # every turn reuses all of the turns before


def test_a_prompt_that_another_machine_computed(run: Sample, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/remote"
    first = run("shared_prompt.py", url, store="here").splitlines()
    tokens = int(first[0].split()[-1])
    assert first == [f"reused: 0 of {tokens}", f"in the remote: {url}"]
    second = run("shared_prompt.py", url, store="there").splitlines()
    assert second == [f"reused: {tokens - 1} of {tokens}", f"in the remote: {url}"]
