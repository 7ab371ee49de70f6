"""`kvsnap pull`: make this store hold a session of a remote; only what it lacks moves."""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import REMOTE_HELP, remote_argument

EXAMPLES = f"""{REMOTE_HELP}
\b
Examples:
  kvsnap pull support s3://team-kv/prod
  kvsnap pull support https://host/kv --as support-of-the-team
"""


@click.command("pull", epilog=EXAMPLES)
@click.argument("session")
@remote_argument
@click.option("--as", "new_name", metavar="NAME", help="Store it here under another name.")
@click.option("--force", is_flag=True, help="Also over a session of other or more tokens here.")
@click.option("--dry-run", is_flag=True, help="Show what would move; write nothing.")
@tenant_option
@click.pass_obj
def command(
    app: App,
    session: str,
    remote: str | None,
    new_name: str | None,
    force: bool,
    dry_run: bool,
    tenant_key_file: Path | None,
) -> None:
    """Pull SESSION from REMOTE (default: KVSNAP_REMOTE); only blocks that are missing here move.

    Each file is checked against the session's own tokens and decoded once before it counts. Exit
    code 3 where some could not be had: resuming computes those.
    """
    from kvsnap.cli.moving import pull_session, tell
    from kvsnap.cli.remote import opened, require_session

    require_session(session, remote)
    tenant = read_tenant(tenant_key_file)
    with opened(remote) as there:
        done = pull_session(
            app, there, session, tenant, new_name=new_name, force=force, dry_run=dry_run
        )
    tell(app.out, done, "pull", "pulled", "from")
