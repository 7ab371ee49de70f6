"""`kvsnap ls`: the sessions of the store."""

from __future__ import annotations

import time
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.formats.tenant import NO_TENANT_ID


@click.command("ls")
@click.pass_obj
def command(app: App) -> None:
    """List the sessions, the one saved last first."""
    with app.store() as store:
        listed = list(store.sessions.list())
        rows = []
        for entry in listed:
            record = entry.session.record if entry.session else None
            rows.append(
                {
                    "session": record.name if record else None,
                    "tenant": entry.path.parent.name,
                    "tokens": len(record.token_ids) if record else None,
                    "blocks": len(record.chain) if record else None,
                    "model": str(record.notes.get("model", "")) if record else None,
                    "kind": str(record.notes.get("kind", "")) if record else None,
                    "revision": record.revision if record else None,
                    "pinned": record.pinned if record else False,
                    "bytes": entry.size,
                    "saved": int(entry.path.stat().st_mtime),
                    "file": str(entry.path),
                    "problem": entry.problem or None,
                }
            )
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
                _name(row),
                str(row["tokens"] if row["tokens"] is not None else "-"),
                str(row["blocks"] if row["blocks"] is not None else "-"),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row["saved"])),
                str(row["model"] or row["problem"] or ""),
            ]
            for row in rows
        ],
    )
    total = sum(row["bytes"] for row in rows)
    app.out.say(f"{units.count(len(rows), 'session')}, {units.size(total)} besides the blocks")


def _name(row: dict[str, Any]) -> str:
    if row["session"] is None:
        return f"(damaged: {row['file']})"
    other = row["tenant"] != NO_TENANT_ID
    return f"{row['session']} (of a tenant's key)" if other else str(row["session"])
