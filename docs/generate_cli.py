"""Write the generated part of docs/cli.md: the help of every command, 80 columns wide.

`python docs/generate_cli.py` rewrites everything below the marker; what stands above it is written
by hand. tests/docs/test_cli_page.py fails where the page and the commands differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from kvsnap.cli.main import cli

PAGE = Path(__file__).with_name("cli.md")
MARKER = "<!-- Everything below is written by docs/generate_cli.py. -->\n"
WIDTH = 80


def generated() -> str:
    """Help of `kvsnap` and of each command, as it is on a terminal of 80 columns."""
    with click.Context(cli, info_name="kvsnap", **cli.context_settings) as parent:
        return "\n".join([_section("kvsnap", cli, None), *_commands("kvsnap", cli, parent)])


def _commands(title: str, group: click.Group, context: click.Context) -> Iterator[str]:
    """The commands of a group, and theirs."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield _section(f"{title} {name}", command, context)
        if isinstance(command, click.Group):
            with click.Context(command, parent=context, info_name=name) as own:
                yield from _commands(f"{title} {name}", command, own)


def page(current: str) -> str:
    """The whole page: the hand-written head of `current`, and the generated part anew."""
    head, marker, _ = current.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE.name} has no line: {MARKER}")
    return f"{head}{MARKER}\n{generated()}"


def _section(title: str, command: click.Command, parent: click.Context | None) -> str:
    name = title.rpartition(" ")[2]
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    lines = command.get_help(context).splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    return f"### {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
