"""The one sink: data on stdout, talk on stderr; human text, `--json`, or nothing but data.

A line stays one line, whoever wrote the words in it: names, notes and reasons may come from a remote
or a file of somebody else's, and must not move a cursor, hide text, or look like a line of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from kvsnap.cli.foreign import MAX_LINE, escaped, escaped_controls, escaped_json, printable


class Output:
    """`json` decides the form of data; `quiet` drops talk, never data or errors."""

    def __init__(self, *, as_json: bool, quiet: bool, verbose: bool) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    def json(self, value: Any) -> None:
        click.echo(escaped_json(json.dumps(value, indent=2, ensure_ascii=False)))

    def text(self, line: str = "") -> None:
        """A line of data for a person; not in JSON mode."""
        if not self.as_json:
            click.echo(escaped(line))

    def stream(self, text: str) -> bool:
        """A model's answer as it comes; False where nobody reads it any more. Not in JSON mode. To a
        file or program it goes as it is."""
        if not self.as_json:
            try:
                if sys.stdout.isatty():
                    text = escaped_controls(text)
                # Without `color` click drops what looks like one.
                click.echo(text, nl=False, color=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return False
        return True

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Plain aligned columns: they read the same on a terminal, in a pipe and in a mail."""
        if self.as_json:
            return
        cells = [list(columns), *[[escaped(str(cell)) for cell in row] for row in rows]]
        widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
        numeric = [_all_numbers([row[n] for row in cells[1:]]) for n in range(len(columns))]
        for row in cells:
            parts = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ]
            click.echo("  ".join(parts).rstrip())

    def say(self, line: str) -> None:
        if not self.quiet:
            click.echo(escaped(line), err=True)

    def detail(self, line: str) -> None:
        if self.verbose:
            click.echo(escaped(line), err=True)

    def warn(self, line: str) -> None:
        click.echo(f"warning: {printable(line, MAX_LINE)}", err=True)

    @property
    def progress(self) -> bool:
        """Whether bars may be drawn: on a terminal only, and not where talk is unwanted."""
        return sys.stderr is not None and sys.stderr.isatty() and not self.quiet


def _all_numbers(cells: list[str]) -> bool:
    return bool(cells) and all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
