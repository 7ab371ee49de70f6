"""`kvsnap keygen`: a new tenant key."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError

EXAMPLES = """\b
Examples:
  kvsnap keygen ~/.config/kvsnap/team.key
  KVSNAP_TENANT_KEY_FILE=~/.config/kvsnap/team.key kvsnap save ...
"""
MODE = 0o600


@click.command("keygen", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def command(app: App, file: Path) -> None:
    """Write a new tenant key into FILE, which must not be there yet.

    Who has the key finds what was saved with it, and nobody else can tell whether a prompt is stored.
    There is no second copy: what was saved with a key that is lost cannot be found again.
    """
    from kvsnap.formats.tenant import parse_key

    text = secrets.token_hex(32)
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    except FileExistsError:
        raise UsageError(
            f"{file} is there already",
            "choose another name: a key that is lost cannot be made again",
        ) from None
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text + "\n")
            out.flush()
            os.fsync(out.fileno())
    except OSError:
        file.unlink(missing_ok=True)
        raise
    tenant = parse_key(text.encode()).tenant_id
    if app.out.as_json:
        app.out.json({"file": str(file), "tenant_id": tenant})
    else:
        app.out.text(f"wrote a new key to {file}; its tenant id is {tenant[:12]}…")
