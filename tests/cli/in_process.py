"""`kvsnap` in this process: what a run says, byte for byte as a terminal would get it."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvsnap.cli.main import main

FINDERS = ("verify", "doctor")
"""Commands whose exit code 1 may be a finding on stdout, and no error."""


@dataclass(frozen=True)
class Ran:
    """A command line, its exit code and what it printed."""

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=_no_json)

    def complaint(self) -> str:
        """What of the contract this run breaks; empty where it keeps it. An error is one line that
        says what, one that says what to do, and both are the last ones."""
        lines = self.err.splitlines()
        errors = [number for number, line in enumerate(lines) if line.startswith("error: ")]
        if self.code not in (0, 1, 2, 3):
            return f"exit code {self.code}"
        if "Traceback" in self.out + self.err or "unexpected" in self.err:
            return f"not an error that a person can act on: {self.err[-500:]}"
        finding = self.code == 1 and self.out and set(FINDERS) & set(self.arguments)
        if (self.code == 0 or finding) and not errors:
            return ""
        told = len(errors) == 1 and errors[0] == len(lines) - 2
        hint = told and lines[-1].startswith("  ") and len(lines[-1]) > 2
        return "" if hint and self.code else f"exit code {self.code} with {self.err[-500:]!r}"


def run(*arguments: object) -> Ran:
    """One command. What click would take for colours, and strip where nobody looks, stays in."""
    words = tuple(str(argument) for argument in arguments)
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    before = signal.getsignal(signal.SIGINT)
    code: Any = None
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch("click.utils.should_strip_ansi", lambda stream, color: False),
    ):
        try:
            main(list(words))
        except SystemExit as ended:
            code = ended.code
        finally:
            signal.signal(signal.SIGINT, before)
    said = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return Ran(words, code, *said)


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")
