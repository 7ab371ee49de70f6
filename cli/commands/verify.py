"""`kvsnap verify`: check files; loud about damage, which a resume passes over with a warning."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App


@click.command("verify")
@click.argument("session", required=False)
@tenant_option
@click.pass_context
def command(ctx: click.Context, session: str | None, tenant_key_file: Path | None) -> int:
    """Check every file of the store, or SESSION and its blocks. Nothing is changed.

    Exit code 1 if anything is bad. A bad block is computed again and replaced by the next save of
    its prompt.
    """
    from kvsnap.cli.progress import bar
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.verify import verify_session, verify_store

    app: App = ctx.obj
    tenant = read_tenant(tenant_key_file)
    with app.store() as store:
        if session is not None:
            report = verify_session(store, tenant_id(tenant), session, tenant)
        else:
            with bar(app.out, "verify", "files") as update:
                report = verify_store(store, tenant, update)
    if app.out.as_json:
        found = dataclasses.asdict(report)
        if session is None:
            del found["evicted"]  # of a session only: the store does not know what it once had
        app.out.json(found)
    else:
        for bad in report.bad:
            app.out.text(f"bad  {bad.path}\n     {bad.reason}")
        summary = f"{units.count(report.checked, 'file')} checked, {len(report.bad)} bad"
        if report.evicted:
            count = units.count(len(report.evicted), "block")
            summary += f"; {count} evicted: resuming computes them"
        if report.unreachable:
            summary += f"; {units.count(len(report.unreachable), 'block')} unreachable until then"
        app.out.text(summary)
        if report.bad:
            app.out.say("save the prompt again: bad blocks are computed anew and replaced")
    return 1 if report.bad else 0
