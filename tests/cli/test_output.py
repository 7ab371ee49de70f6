"""What the command line prints where, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "llama_cpp", "numpy", "rich", "zstandard", "sqlite3")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["save", "--help"], ["resume", "--help"]]
)
def test_help_imports_no_engine(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from kvsnap.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_importing_kvsnap_loads_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, kvsnap\n"
        "kvsnap.Store, kvsnap.Session\n"
        "print([m for m in ('torch', 'llama_cpp', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.engine
def test_resuming_a_lossless_llama_session_loads_no_torch(
    kvsnap: Any, model: Path, chat: Path, store: Path
) -> None:
    kvsnap("save", "--model", model, "--messages", chat, "--session", "s")
    code = (
        "import sys\n"
        "from kvsnap.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as done: assert not done.code\n"
        "assert 'llama_cpp' in sys.modules\n"
        "assert 'torch' not in sys.modules"
    )
    command = ["--store", store, "-q", "resume", "s", "--model", model, "--max-tokens", "1"]
    subprocess.run([sys.executable, "-c", code, *map(str, command)], check=True)


@pytest.mark.engine
def test_without_a_terminal_there_are_no_colours_and_no_bars(
    kvsnap: Any, model: Path, chat: Path
) -> None:
    for command in (
        ["save", "--model", model, "--messages", chat, "--session", "s"],
        ["resume", "s", "--model", model, "--max-tokens", 4],
        ["ls"], ["show", "s"], ["stats"], ["verify"], ["doctor"],
    ):  # fmt: skip
        done = kvsnap(*command, COLUMNS="80", FORCE_COLOR="1")
        assert done.code == 0
        assert "\x1b" not in done.out + done.err
        assert "━" not in done.out + done.err


@pytest.mark.engine
def test_data_goes_to_stdout_and_talk_to_stderr(kvsnap: Any, model: Path, chat: Path) -> None:
    assert kvsnap("ls").out == ""
    assert "no sessions yet" in kvsnap("ls").err
    assert kvsnap("--quiet", "ls").err == ""
    kvsnap("save", "--model", model, "--messages", chat, "--session", "s")
    done = kvsnap("--quiet", "resume", "s", "--model", model, "--max-tokens", 4, "--no-save")
    assert done.err == ""
    text = kvsnap("--json", "resume", "s", "--model", model, "--max-tokens", 4, "--no-save").json
    assert done.out.rstrip("\n") == text["text"]
    for command in (["ls"], ["show", "s"], ["stats"], ["verify"], ["doctor"]):
        json.loads(kvsnap("--json", *command).out)


@pytest.mark.engine
def test_a_sessions_life_from_save_to_rm(kvsnap: Any, model: Path, chat: Path, store: Path) -> None:
    kvsnap("save", "--model", model, "--messages", chat, "--session", "alice/42", "--codec", "raw")
    assert [row["session"] for row in kvsnap("--json", "ls").json] == ["alice/42"]
    shown = kvsnap("--json", "show", "alice/42").json
    assert shown["codec"] == "raw"
    assert len(shown["blocks"]) == len(shown["token_ids"]) // 64
    block = kvsnap("--json", "show", shown["blocks"][0]["name"][:10]).json
    assert block["token_ids"] == shown["token_ids"][:64]
    stats = kvsnap("--json", "stats").json
    assert (stats["blocks"], stats["sessions"], stats["codecs"]) == (
        len(shown["blocks"]), 1, {"raw": len(shown["blocks"])},
    )  # fmt: skip
    assert kvsnap("rm", "alice/42", "none").code == 1
    assert [row["session"] for row in kvsnap("--json", "ls").json] == ["alice/42"]
    assert kvsnap("rm", "alice/42").code == 0
    assert kvsnap("--json", "ls").json == []
    assert list(store.rglob("blocks/*/*")), "blocks stay for whoever shares them"


def test_read_only_commands_create_nothing(kvsnap: Any, store: Path) -> None:
    for command in (["ls"], ["stats"], ["verify"], ["doctor"], ["show", "x"], ["rm", "x"]):
        kvsnap(*command)
        assert not store.exists()
