"""`kvsnap keygen`: a new tenant key, or this machine's signing key."""

from __future__ import annotations

import secrets
from pathlib import Path

import click

from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError

EXAMPLES = """\b
Examples:
  kvsnap keygen ~/.config/kvsnap/team.key
  KVSNAP_TENANT_KEY_FILE=~/.config/kvsnap/team.key kvsnap save ...
  kvsnap keygen --signing
"""


@click.command("keygen", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--signing",
    is_flag=True,
    help="Make a signing key instead. Default FILE: where kvsnap looks for it"
    " (KVSNAP_SIGNING_KEY_FILE, or the user's configuration folder).",
)
@click.pass_obj
def command(app: App, file: Path | None, signing: bool) -> None:
    """Write a new tenant key into FILE, which must not be there yet.

    Who has the key finds what was saved with it, and nobody else can tell whether a prompt is stored.
    There is no second copy: what was saved with a key that is lost cannot be found again.
    """
    from kvsnap.kvstore.files import DIR_MODE
    from kvsnap.kvstore.signing_key import signing_key_path, write_key_file

    if file is None and not signing:
        raise UsageError("FILE is missing", "kvsnap keygen FILE, or kvsnap keygen --signing")
    path = file or signing_key_path()
    if file is None:
        path.parent.mkdir(mode=DIR_MODE, parents=True, exist_ok=True)
    found, text, content = _signing_key() if signing else _tenant_key()
    try:
        write_key_file(path, content)
    except FileExistsError:
        raise UsageError(
            f"{path} is there already",
            "choose another name: a key that is lost cannot be made again",
        ) from None
    if app.out.as_json:
        app.out.json({"file": str(path), **found})
    else:
        app.out.text(f"wrote a new key to {path}; {text}")


def _tenant_key() -> tuple[dict[str, str], str, bytes]:
    from kvsnap.formats.tenant import parse_key

    content = f"{secrets.token_hex(32)}\n".encode()
    tenant = parse_key(content).tenant_id
    return {"tenant_id": tenant}, f"its tenant id is {tenant[:12]}…", content


def _signing_key() -> tuple[dict[str, str], str, bytes]:
    from kvsnap.formats.signature import new_signing_key

    key = new_signing_key()
    return {"public": key.public}, f"others trust it by: kvsnap trust add {key.public}", key.pem()
