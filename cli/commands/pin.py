"""`kvsnap pin`: keep sessions and blocks from eviction."""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App


@click.command("pin")
@click.argument("what", nargs=-1, required=True, metavar="SESSION|BLOCK...")
@click.option("--for", "time", metavar="TIME", help="For a time only: 90m, 12h, 7d, 2w.")
@tenant_option
@click.pass_obj
def command(
    app: App, what: tuple[str, ...], time: str | None, tenant_key_file: Path | None
) -> None:
    """Keep sessions, or blocks and all before them, from eviction until they are unpinned.

    A pinned session stays so when it is saved again.
    """
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.inspect import find_pinnable

    seconds = units.parse_time(time) if time is not None else None
    key = read_tenant(tenant_key_file)
    tenant = tenant_id(key)
    with app.store() as store:
        found = [find_pinnable(store, key, name) for name in what]
        for item in found:
            if isinstance(item, bytes):
                store.pins.pin_block(item, seconds)
            else:
                store.pins.pin_session(tenant, item, seconds)
    if app.out.as_json:
        app.out.json({"pinned": list(what), "seconds": seconds})
    until = f" for {time}" if time else ""
    app.out.text("pinned " + ", ".join(repr(name) for name in what) + until)
