"""`kvsnap trust ls`: whom the store believes."""

from __future__ import annotations

import click

from kvsnap.cli.main import App


@click.command("ls")
@click.pass_obj
def command(app: App) -> None:
    """Show whom the store believes, and this machine's own key, which others may add."""
    from kvsnap.kvstore.signing_key import find_signing_key

    key = find_signing_key()
    with app.store() as store:
        listed = store.trust.listed if store.trust is not None else {}
    if app.out.as_json:
        own = key.public if key is not None else None
        app.out.json({"own": own, "trusted": [{"key": k, "name": n} for k, n in listed.items()]})
        return
    app.out.table(("KEY", "NAME"), [(k, n) for k, n in listed.items()])
    if not listed:
        app.out.say("nobody: blocks need no signature here")
    if key is not None:
        app.out.text(f"this machine: {key.public}")
    else:
        app.out.say("this machine has no key yet: kvsnap keygen --signing makes one")
