"""`kvsnap trust rm`: believe a key no more."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli import units
from kvsnap.cli.main import App


@click.command("rm")
@click.argument("key", metavar="KEY|NAME")
@click.pass_obj
def command(app: App, key: str) -> None:
    """Believe a key no more; what only it has signed is set aside.

    With the last key gone, blocks need no signature again.
    """
    from kvsnap.cli.progress import bar
    from kvsnap.kvstore.trust_list import remove

    with app.store() as store, bar(app.out, "trust", "blocks") as update:
        done = remove(store, key, update)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(done))
        return
    app.out.text(f"no longer trusted: {done.key}" + (f" ({done.name})" if done.name else ""))
    if done.set_aside:
        app.out.say(f"set aside {units.count(done.set_aside, 'block')} that no other key signed")
