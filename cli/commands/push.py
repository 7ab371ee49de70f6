"""`kvsnap push`: make a remote hold a session; only what it lacks moves."""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.cli.inputs import encrypt_option, read_tenant, sign_option, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import REMOTE_HELP, remote_argument

EXAMPLES = f"""{REMOTE_HELP}
\b
Examples:
  kvsnap push support s3://team-kv/prod
  kvsnap push system-prompt s3://team-kv/prod --sign
  KVSNAP_REMOTE=file:///mnt/kv kvsnap push support --dry-run
"""


@click.command("push", epilog=EXAMPLES)
@click.argument("session")
@remote_argument
@click.option("--force", is_flag=True, help="Also over a session of other or more tokens there.")
@sign_option
@encrypt_option
@click.option("--dry-run", is_flag=True, help="Show what would move; write nothing.")
@tenant_option
@click.pass_obj
def command(
    app: App,
    session: str,
    remote: str | None,
    force: bool,
    sign: bool,
    encrypt: bool,
    dry_run: bool,
    tenant_key_file: Path | None,
) -> None:
    """Push SESSION to REMOTE (default: KVSNAP_REMOTE); only blocks that it lacks move.

    Blocks go first and the session last, so nobody pulls half of one. A push that was interrupted
    is taken up by the next. Exit code 3 where blocks of the session were evicted here.
    """
    from kvsnap.cli.moving import push_session, tell
    from kvsnap.cli.remote import opened, require_session

    require_session(session, remote)
    tenant = read_tenant(tenant_key_file)
    with opened(remote) as there:
        done = push_session(
            app, there, session, tenant, force=force, sign=sign, encrypt=encrypt, dry_run=dry_run
        )
    tell(app.out, done, "push", "pushed", "to")
