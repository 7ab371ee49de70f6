"""Lines, tables and JSON of the command line: a line stays one line, JSON stays the same by value."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

from kvsnap.cli.output import Output
from tests.cli.in_process import run
from tests.cli.wicked import EVIL, WAY, assert_harmless


@pytest.mark.parametrize(
    "words",
    [
        ["show", WAY], ["ls", WAY], ["pin", WAY], ["rm", WAY], ["verify", WAY], [WAY], [f"--{WAY}"],
        ["push", "a", WAY], ["pull", WAY, "file:///nowhere"], ["import", WAY], ["stats", "--capacity", WAY],
        ["save", "--model", WAY, "--prompt", "x"], ["recompress", "a", "--codec", WAY],
        ["resume", WAY, "--model", "x"], ["trust", "rm", WAY], ["trust", "add", WAY], ["keygen", f"/nowhere/{WAY}"],
        ["simulate", "--policy", WAY], ["simulate", "--trace", WAY], ["pin", "a", "--for", WAY],
        ["gc", "--remote", WAY], ["bench", WAY], ["save", "--session", WAY, "--model", "x", "--prompt", "x"],
    ],
    ids=lambda words: words[0] if words[0].isprintable() else "word",
)  # fmt: skip
def test_words_of_the_command_line_come_back_escaped(tmp_path: Path, words: list[str]) -> None:
    ran = run(*words, "--store", tmp_path / EVIL)
    assert_harmless(ran)
    assert ran.code in (1, 2)


@pytest.mark.parametrize("say", ["text", "say", "detail", "warn", "table"])
def test_a_line_stays_one_line_and_prints(say: str) -> None:
    out = Output(as_json=False, quiet=False, verbose=True)
    given: dict[str, tuple[Any, ...]] = {"table": (("a", "b"), [(WAY, "x"), ("a", WAY)])}
    for redirect in (contextlib.redirect_stdout, contextlib.redirect_stderr):
        stream = Terminal()
        with redirect(stream):
            getattr(out, say)(*given.get(say, (WAY,)))
        lines = stream.getvalue().split("\n")
        assert all(line.isprintable() for line in lines)
        if stream.getvalue():
            assert len(lines) == (4 if say == "table" else 2)
            break
    assert (
        r"way\x1b[2J\x07\x7f\x9b31m\u202eexe.\u2066\u200f\r\nINJECTED\x1b]52;" in stream.getvalue()
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_moves_no_cursor_and_stays_as_it_is_in_a_pipe() -> None:
    answer = "One\n\ttwo \x1b[2J\x9b31m\r שלום\u200f 👩\u200d🚀"
    for stream, wanted in (
        (Terminal(), answer.replace("\x1b", r"\x1b").replace("\x9b", r"\x9b").replace("\r", r"\r")),
        (io.StringIO(), answer),
    ):
        with contextlib.redirect_stdout(stream):
            Output(as_json=False, quiet=False, verbose=False).stream(answer)
        assert stream.getvalue() == wanted


def test_json_is_the_same_by_value_and_prints() -> None:
    value = {WAY: [WAY, "\ud800", os.fsdecode(b"\x9b"), "\U000e0001", "\xa0", "語", 1.5, None]}
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        Output(as_json=True, quiet=False, verbose=False).json(value)
    assert json.loads(stream.getvalue()) == value
    assert all(line.isprintable() for line in stream.getvalue().split("\n"))
    assert "語" in stream.getvalue()
