"""`kvsnap verify`: check files; loud about damage, which a resume passes over with a warning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.foreign import printable
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import is_url, opened, remote_argument

EXAMPLES = """\b
Examples:
  kvsnap verify
  kvsnap verify support
  kvsnap verify s3://team-kv/prod
  kvsnap verify support s3://team-kv/prod
"""


@click.command("verify", epilog=EXAMPLES)
@click.argument("session", required=False)
@remote_argument
@tenant_option
@click.pass_context
def command(
    ctx: click.Context, session: str | None, remote: str | None, tenant_key_file: Path | None
) -> int:
    """Check every file of the store, or SESSION and its blocks. Nothing is changed.

    With a tenant's key its own files; without one all, as far as can be told without the keys. With
    REMOTE, which may stand alone: what is there. Exit code 1 if anything is bad. A bad block is
    computed again and replaced by the next save of its prompt; in a remote by push --force.
    """
    if session is not None and remote is None and is_url(session):
        session, remote = None, session
    if remote is not None:
        return _verify_remote(ctx.obj, session, remote, read_tenant(tenant_key_file))
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
            app.out.text(f"bad  {bad.path}")
            app.out.text(f"     {printable(bad.reason, 300)}")
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


def _verify_remote(app: App, session: str | None, url: str, tenant: Any) -> int:
    from kvsnap.cli.progress import in_turn
    from kvsnap.kvstore.sharing.verify_remote import verify_remote

    with app.store() as store:
        trust = store.trust
    with opened(url) as remote, in_turn(app.out, {"verify": "verify"}, "files") as step:
        report = verify_remote(
            remote,
            name=session,
            tenant=tenant,
            trust=trust,
            progress=lambda done, total: step("verify", done, total),
        )
    if app.out.as_json:
        found = dataclasses.asdict(report)
        del found["evicted"], found["sealed"]  # what a remote once had, nobody knows
        app.out.json(found)
        return 1 if report.bad else 0
    for bad in report.bad:
        app.out.text(f"bad  {printable(bad.path, 200)}")
        app.out.text(f"     {printable(bad.reason, 300)}")
    app.out.text(f"{units.count(report.checked, 'file')} checked, {len(report.bad)} bad")
    if not report.checked:
        app.out.warn(f"there is nothing in {printable(remote.url, 200)}: is that the right place?")
    for left in report.unreachable:
        app.out.say(f"not checked: {printable(left, 300)}")
    if report.bad:
        app.out.say("kvsnap push --force from where the session is whole replaces bad files")
    return 1 if report.bad else 0
