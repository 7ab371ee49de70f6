"""`kvsnap export`: a session and its blocks in one file, for people without a server."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvsnap.cli.inputs import encrypt_option, read_tenant, sign_option, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import local_file
from kvsnap.formats.errors import UsageError

EXAMPLES = """\b
Examples:
  kvsnap export support support.kvsnap
"""


@click.command("export", epilog=EXAMPLES)
@click.argument("session")
@click.argument("out", metavar="OUT.kvsnap")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@sign_option
@encrypt_option
@tenant_option
@click.pass_obj
def command(
    app: App,
    session: str,
    out: str,
    force: bool,
    sign: bool,
    encrypt: bool,
    tenant_key_file: Path | None,
) -> None:
    """Write SESSION and its blocks into the file OUT.kvsnap: a plain tar.

    Exit code 3 where blocks of the session were evicted here.
    """
    from kvsnap.cli.moving import push_session, tell
    from kvsnap.kvstore.remotes.archive import Archive

    tenant, path = read_tenant(tenant_key_file), local_file(out)
    if not force and os.path.lexists(path):
        raise UsageError(f"{path} is there already", "choose another name, or --force")
    with Archive.create(path) as archive:
        done = push_session(app, archive, session, tenant, force=force, sign=sign, encrypt=encrypt)
    tell(app.out, done, "export", "exported", "to")
