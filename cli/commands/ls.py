"""`kvsnap ls`: the sessions of the store, or of a remote."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.foreign import printable
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.cli.remote import opened, remote_argument


@click.command("ls")
@remote_argument
@tenant_option
@click.pass_obj
def command(app: App, remote: str | None, tenant_key_file: Path | None) -> None:
    """List the sessions, the one saved last first; or those of REMOTE, the one pushed last first.

    With a tenant's key its own; without one all.
    """
    from kvsnap.formats.tenant import tenant_id

    tenant = read_tenant(tenant_key_file)
    if remote is not None:
        from kvsnap.cli.remote_sessions import list_sessions

        with opened(remote) as there:
            list_sessions(app, there)
        return
    with app.store() as store:
        own = tenant.tenant_id if tenant is not None else None
        rows = [_row(entry) for entry in store.listing.of(own)]
    rows.sort(key=lambda row: row["saved"], reverse=True)
    if app.out.as_json:
        app.out.json(rows)
        return
    if not rows:
        app.out.say("no sessions yet; kvsnap save --session NAME makes one")
        return
    app.out.table(
        ["session", "tokens", "blocks", "saved", "model"],
        [
            [
                _name(row, tenant_id(tenant)),
                str(row["tokens"] if row["tokens"] is not None else "-"),
                _blocks(row),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved"])),
                _what(row),
            ]
            for row in rows
        ],
    )
    total = sum(row["bytes"] for row in rows)
    app.out.say(f"{units.count(len(rows), 'session')}, {units.size(total)} besides the blocks")


def _row(entry: Any) -> dict[str, Any]:
    facts = entry.facts
    there = facts.name is not None
    until = entry.pinned_until
    return {
        "session": facts.name,
        "tenant": entry.path.parent.name,
        "tokens": facts.tokens if there else None,
        "blocks": facts.blocks if there else None,
        "stored_blocks": entry.stored_blocks if there else None,
        "model": facts.model if there else None,
        "kind": facts.kind if there else None,
        "revision": facts.revision if there else None,
        "pinned": until is not None,
        "pinned_until": int(until) if until is not None and math.isfinite(until) else None,
        "bytes": entry.bytes,
        "saved": entry.saved,
        "file": str(entry.path),
        "problem": facts.problem or None,
    }


def _what(row: dict[str, Any]) -> str:
    parts = [
        printable(str(row["model"] or row["problem"] or "")),
        "pinned" if row["pinned"] else "",
    ]
    return ", ".join(part for part in parts if part)


def _blocks(row: dict[str, Any]) -> str:
    """All of them, or how many are left after eviction."""
    if row["blocks"] is None:
        return "-"
    if row["stored_blocks"] < row["blocks"]:
        return f"{row['stored_blocks']}/{row['blocks']}"
    return str(row["blocks"])


def _name(row: dict[str, Any], own: str) -> str:
    if row["session"] is None:
        return f"(damaged: {row['file']})" if row["problem"] else "(sealed)"
    other = row["tenant"] != own
    return f"{row['session']} (of a tenant's key)" if other else str(row["session"])
