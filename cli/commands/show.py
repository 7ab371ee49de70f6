"""`kvsnap show`: one session or block in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.formats.errors import NotFound


@click.command("show")
@click.argument("what", metavar="SESSION|BLOCK")
@tenant_option
@click.pass_obj
def command(app: App, what: str, tenant_key_file: Path | None) -> None:
    """Show one session, or the block whose name begins with BLOCK (4 or more digits)."""
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.inspect import describe_block, describe_session

    with app.store() as store:
        try:
            found = describe_session(store, tenant_id(read_tenant(tenant_key_file)), what)
        except NotFound:
            found = describe_block(store, what)
    if app.out.as_json:
        app.out.json(found)
    elif "session" in found:
        _session(app, found)
    else:
        _block(app, found)


def _session(app: App, found: dict[str, Any]) -> None:
    identity, notes = found["identity"], found["notes"]
    there = sum(block["stored"] for block in found["blocks"])
    bytes_of_blocks = sum(block["bytes"] for block in found["blocks"])
    _lines(
        app,
        [
            ("session", f"{found['session']} (revision {found['revision']})"),
            ("model", f"{notes.get('model', '')} ({identity.get('architecture', '')})"),
            ("kv", ", ".join(f"{k} {v}" for k, v in sorted(identity.get("kv_types", {}).items()))),
            (
                "tokens",
                f"{found['tokens']}, of which the last {found['tail_tokens']} in its own file",
            ),
            ("blocks", f"{there} of {len(found['blocks'])} stored, {units.size(bytes_of_blocks)}"),
            ("file", f"{found['path']} ({units.size(found['bytes'])})"),
            ("codec", f"{found['codec']}, {found['fidelity']}"),
            ("pinned", "yes" if found["pinned"] else "no"),
        ],
    )
    for message in notes.get("messages", []):
        text = " ".join(str(message.get("content", "")).split())
        app.out.text(f"  {message.get('role', ''):10}{text[:66]}{'…' if len(text) > 66 else ''}")


def _block(app: App, found: dict[str, Any]) -> None:
    lines = [("block", found["block"]), ("file", found["path"])]
    if found["lost"]:
        lines.append(("lost", found["lost"]))
    if "start" in found:
        last = found["start"] + found["tokens"] - 1
        lines += [
            ("parent", found["parent"]),
            ("positions", f"{found['start']} to {last}"),
            ("size", units.size(found["bytes"])),
            ("codec", f"{found['codec']}, {found['fidelity']}"),
            ("reachable", "yes" if found["reachable"] else "no: one before it is missing"),
        ]
    _lines(app, lines)


def _lines(app: App, lines: list[tuple[str, str]]) -> None:
    for label, value in lines:
        app.out.text(f"{label:10}{value}")
