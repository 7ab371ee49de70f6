"""The one sink: data on stdout, talk on stderr; human text, `--json`, or nothing but data."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click


class Output:
    """`json` decides the form of data; `quiet` drops talk, never data or errors."""

    def __init__(self, *, as_json: bool, quiet: bool, verbose: bool) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose

    def json(self, value: Any) -> None:
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))

    def text(self, text: str, newline: bool = True) -> None:
        """Data for a person; not in JSON mode."""
        if not self.as_json:
            click.echo(text, nl=newline)

    def stream(self, text: str) -> bool:
        """Data as it comes; False where nobody reads it any more. Not in JSON mode."""
        if not self.as_json:
            try:
                click.echo(text, nl=False)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return False
        return True

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Plain aligned columns: they read the same on a terminal, in a pipe and in a mail."""
        if self.as_json:
            return
        cells = [list(columns), *[[str(c) for c in row] for row in rows]]
        widths = [max(len(row[n]) for row in cells) for n in range(len(columns))]
        numeric = [_all_numbers([row[n] for row in cells[1:]]) for n in range(len(columns))]
        for row in cells:
            parts = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numeric, strict=True)
            ]
            click.echo("  ".join(parts).rstrip())

    def say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text, err=True)

    def detail(self, text: str) -> None:
        if self.verbose:
            click.echo(text, err=True)

    def warn(self, text: str) -> None:
        click.echo(f"warning: {text}", err=True)

    @property
    def progress(self) -> bool:
        """Whether bars may be drawn: on a terminal only, and not where talk is unwanted."""
        return sys.stderr is not None and sys.stderr.isatty() and not self.quiet


def _all_numbers(cells: list[str]) -> bool:
    return bool(cells) and all(cell[:1].isdigit() or cell in ("", "-") for cell in cells)
