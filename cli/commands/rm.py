"""`kvsnap rm`: remove sessions; their blocks stay for whoever shares them."""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App


@click.command("rm")
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...")
@tenant_option
@click.pass_obj
def command(app: App, sessions: tuple[str, ...], tenant_key_file: Path | None) -> None:
    """Remove sessions. Their blocks stay in the store: other prompts may share them."""
    from kvsnap.formats.tenant import tenant_id

    tenant = tenant_id(read_tenant(tenant_key_file))
    with app.store() as store:
        for name in sessions:  # all or nothing: a typo must not remove half of what was meant
            store.sessions.require(tenant, name)
        freed = sum(store.sessions.remove(tenant, name) for name in sessions)
    if app.out.as_json:
        app.out.json({"removed": list(sessions), "freed_bytes": freed})
    else:
        app.out.text("removed " + ", ".join(repr(name) for name in sessions))
