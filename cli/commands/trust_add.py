"""`kvsnap trust add`: believe who has this key."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli import units
from kvsnap.cli.main import App

EXAMPLES = """\b
Examples:
  kvsnap trust add 5f3c…(64 digits) --name build-server
  kvsnap trust add 5f3c… --vouch
"""


@click.command("add", epilog=EXAMPLES)
@click.argument("key")
@click.option("--name", default="", metavar="WORDS", help="Whose key it is, for people.")
@click.option(
    "--vouch",
    is_flag=True,
    help="Sign what is stored here already: all of it was computed on this machine.",
)
@click.pass_obj
def command(app: App, key: str, name: str, vouch: bool) -> None:
    """Believe KEY: 64 digits that `kvsnap trust ls` shows on the machine that signs.

    What is stored here and signed by nobody that is trusted is set aside: it is computed or fetched
    again when it is needed. Running programs go on as before until they open the store again.
    """
    from kvsnap.cli.progress import bar
    from kvsnap.kvstore.trust_list import add

    with app.store() as store, bar(app.out, "trust", "blocks") as update:
        done = add(store, key, name, vouch=vouch, progress=update)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(done))
        return
    app.out.text(f"trusted {done.key}" + (f" ({done.name})" if done.name else ""))
    if vouch:
        count = units.count(done.vouched, "block")
        app.out.say(f"signed {count} and {units.count(done.sessions, 'session')} that were here")
    if done.set_aside:
        app.out.say(f"set aside {units.count(done.set_aside, 'block')} that no trusted key signed")
