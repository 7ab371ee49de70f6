"""`kvsnap rm`: remove sessions; their blocks stay for whoever shares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import is_url, opened, remote_option
from kvsnap.formats.errors import UsageError


@click.command("rm")
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...")
@remote_option
@tenant_option
@click.pass_obj
def command(
    app: App, sessions: tuple[str, ...], remote: str | None, tenant_key_file: Path | None
) -> None:
    """Remove sessions. Their blocks stay: others may share them; gc removes what nobody needs."""
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.keyring import Keyring

    if any(map(is_url, sessions)):
        raise UsageError(
            "a remote stands among the sessions", "kvsnap rm SESSION --remote URL removes it there"
        )
    key = read_tenant(tenant_key_file)
    tenant, keys = tenant_id(key), Keyring()
    keys.add(key)
    if remote is not None:
        from kvsnap.kvstore.sharing.remove import remove

        with opened(remote) as there:
            _tell(app, sessions, remove(there, keys, tenant, sessions), f" from {there.url}")
        return
    with app.store() as store:
        for name in sessions:  # all or nothing: a typo must not remove half of what was meant
            store.sessions.require(tenant, name)
        freed = sum(store.sessions.remove(tenant, name) for name in sessions)
    _tell(app, sessions, freed, "")


def _tell(app: App, sessions: Sequence[str], freed: int, where: str) -> None:
    if app.out.as_json:
        app.out.json({"removed": list(sessions), "freed_bytes": freed})
    else:
        app.out.text("removed " + ", ".join(repr(name) for name in sessions) + where)
