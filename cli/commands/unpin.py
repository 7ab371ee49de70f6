"""`kvsnap unpin`: let go of what was pinned."""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App


@click.command("unpin")
@click.argument("what", nargs=-1, required=True, metavar="SESSION|BLOCK...")
@tenant_option
@click.pass_obj
def command(app: App, what: tuple[str, ...], tenant_key_file: Path | None) -> None:
    """Let sessions or blocks that were pinned go when room is needed."""
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.inspect import find_pinnable

    key = read_tenant(tenant_key_file)
    tenant = tenant_id(key)
    with app.store() as store:
        found = [find_pinnable(store, key, name) for name in what]
        for item in found:  # all or nothing: a typo must not let go of half of what was meant
            store.pins.require(tenant, item)
        for item in found:
            if isinstance(item, bytes):
                store.pins.unpin_block(item)
            else:
                store.pins.unpin_session(tenant, item)
    if app.out.as_json:
        app.out.json({"unpinned": list(what)})
    app.out.text("unpinned " + ", ".join(repr(name) for name in what))
