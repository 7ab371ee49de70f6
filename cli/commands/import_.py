"""`kvsnap import`: a session out of a file that `kvsnap export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import local_file
from kvsnap.formats.errors import NotFound, UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.remotes.base import Remote

EXAMPLES = """\b
Examples:
  kvsnap import support.kvsnap
  kvsnap import support.kvsnap --as support-of-the-team
"""


@click.command("import", epilog=EXAMPLES)
@click.argument("file", metavar="FILE")
@click.argument("session", required=False)
@click.option("--as", "new_name", metavar="NAME", help="Store it here under another name.")
@click.option("--force", is_flag=True, help="Also over a session of other or more tokens here.")
@click.option("--dry-run", is_flag=True, help="Show what would come; write nothing.")
@tenant_option
@click.pass_obj
def command(
    app: App,
    file: str,
    session: str | None,
    new_name: str | None,
    force: bool,
    dry_run: bool,
    tenant_key_file: Path | None,
) -> None:
    """Take SESSION out of FILE, which kvsnap export wrote; without SESSION the only one in it.

    Each file in it is checked against the session's own tokens and decoded once before it counts.
    """
    from kvsnap.cli.moving import pull_session, tell
    from kvsnap.kvstore.remotes.archive import Archive

    tenant, path = read_tenant(tenant_key_file), local_file(file)
    with Archive.open(path) as archive:
        name = session if session is not None else _only_session(archive, tenant)
        done = pull_session(
            app, archive, name, tenant, new_name=new_name, force=force, dry_run=dry_run
        )
    tell(app.out, done, "import", "imported", "from")


def _only_session(archive: Remote, tenant: Any) -> str:
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.keyring import Keyring
    from kvsnap.kvstore.sharing.manifests import every

    keys = Keyring()
    keys.add(tenant)
    found = [pushed.manifest for pushed in every(archive, keys)]
    there = [manifest for manifest in found if manifest is not None]
    names = sorted(one.name for one in there if one.tenant_id == tenant_id(tenant))
    if len(names) > 1:
        shown = ", ".join(map(repr, names[:10]))
        raise UsageError(
            f"{archive.url} holds {len(names)} sessions: {shown}", "name the one to take"
        )
    if not names:
        raise NotFound(
            f"{archive.url} holds no session that can be taken",
            "give the key that it was saved with: --tenant-key-file"
            if there
            else "export it again from where it is whole",
        )
    return names[0]
