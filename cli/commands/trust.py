"""`kvsnap trust`: whose signatures the store believes."""

from __future__ import annotations

import click

from kvsnap.cli.main import LazyGroup

COMMANDS = {
    "add": "Believe who has this key.",
    "ls": "Show whom the store believes, and this machine's own key.",
    "rm": "Believe a key no more.",
}
"""Name → one line of help; cli/commands/trust_NAME.py is imported when the command runs."""


@click.group("trust", cls=LazyGroup, table=COMMANDS, prefix="trust_")
def command() -> None:
    """Use only what trusted machines computed and signed.

    A store that trusts somebody uses blocks and sessions that one of these keys, or this machine's
    own, has signed. What is saved is signed from then on, and pushed so. Without any key nothing is
    asked for.
    """
