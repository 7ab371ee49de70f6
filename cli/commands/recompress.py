"""`kvsnap recompress`: a session's blocks by another codec."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar
from kvsnap.formats.errors import Unsupported, UsageError


@click.command("recompress")
@click.argument("session")
@click.option("--codec", "codec_id", metavar="ID", required=True, help="The codec to store it by.")
@tenant_option
@click.pass_obj
def command(app: App, session: str, codec_id: str, tenant_key_file: Path | None) -> None:
    """Store a session's blocks by another codec, from its exact ones; no model is needed.

    A lossy codec makes a chain of its own; the exact blocks stay for others, and go when room is
    needed. A session that is lossy already is refused: one loss must not be added to another.
    """
    from kvsnap.cli import interrupt
    from kvsnap.formats.codecs import chosen_codec
    from kvsnap.kvstore.recompress import recompress

    tenant = read_tenant(tenant_key_file)
    try:
        codec = chosen_codec(codec_id)
    except Unsupported as error:
        raise UsageError(error.what, error.hint) from error
    with app.store() as store, bar(app.out, "recompress", "blocks") as draw:

        def update(done: int, total: int) -> None:
            interrupt.check()
            draw(done, total)

        found = recompress(store, session, codec, tenant, update)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(found))
    app.out.text(
        f"{found.session!r} is stored by {found.codec} now (fidelity {found.fidelity}):"
        f" {units.count(found.blocks, 'block')},"
        f" {units.size(found.bytes_before)} → {units.size(found.bytes_after)}"
    )
