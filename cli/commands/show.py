"""`kvsnap show`: one session or block in full, or the tree of shared prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.foreign import printable
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.formats.errors import NotFound, UsageError


@click.command("show")
@click.argument("what", metavar="SESSION|BLOCK", required=False)
@click.option("--tree", is_flag=True, help="The tree of shared prefixes; without SESSION all.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 100_000),
    default=100,
    show_default=True,
    help="Nodes of the tree to show, the most reused first.",
)
@tenant_option
@click.pass_obj
def command(
    app: App, what: str | None, tree: bool, limit: int, tenant_key_file: Path | None
) -> None:
    """Show one session, or the block whose name begins with BLOCK (4 or more digits).

    A node of the tree is a run of blocks without a branch: its positions, blocks and size, how many
    requests reused it or what follows it, the name of its last block, and the sessions that end
    in it.
    """
    from kvsnap.formats.tenant import tenant_id
    from kvsnap.kvstore.inspect import describe_block, describe_session

    tenant = read_tenant(tenant_key_file)
    if tree:
        _tree(app, what, limit, tenant)
        return
    if what is None:
        raise UsageError("there is nothing to show", "name a session or block, or add --tree")
    with app.store() as store:
        try:
            found = describe_session(store, tenant_id(tenant), what)
        except NotFound:
            found = describe_block(store, what, tenant)
    if app.out.as_json:
        app.out.json(found)
    elif "session" in found:
        _session(app, found)
    else:
        _block(app, found)


def _tree(app: App, what: str | None, limit: int, tenant: Any) -> None:
    from kvsnap.cli.draw_tree import draw
    from kvsnap.kvstore.tree import Tree, deepest_block, read_tree

    with app.store() as store:
        block = deepest_block(store, tenant, what) if what is not None else None
        empty = what is not None and block is None
        tree = Tree((), 0) if empty else read_tree(store, limit, block, tenant)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(tree))
    for line in draw(tree):
        app.out.text(line)
    if not tree.nodes:
        app.out.say(f"no block of {what!r} is stored" if what else "no blocks yet")


def _max_kl(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `save --max-kl` measured."""
    told: Any = notes.get("max_kl")
    try:
        if not told["held_out_tokens"]:
            return [("kl", "too short to measure codecs on: exact")]
        text = f"at most {told['limit']:.1e} above the engine's floor of {told['floor']:.1e}:"
        return [("kl", f"{text} {told['codec']} is {told['excess']:.1e} above it")]
    except (TypeError, LookupError, ValueError):  # none, or notes of a program of somebody's own
        return []


def _session(app: App, found: dict[str, Any]) -> None:
    identity, notes = found["identity"], found["notes"]
    model, architecture = str(notes.get("model", "")), str(identity.get("architecture", ""))
    types = identity.get("kv_types")
    kv = (
        sorted(f"{group} {name}" for group, name in types.items())
        if isinstance(types, dict)
        else []
    )
    there = sum(block["stored"] for block in found["blocks"])
    bytes_of_blocks = sum(block["bytes"] for block in found["blocks"])
    where = "its state checkpoint" if found["state"] else "its own file"
    _lines(
        app,
        [
            ("session", f"{found['session']} (revision {found['revision']})"),
            ("model", f"{printable(model)} ({printable(architecture)})"),
            ("kv", printable(", ".join(kv), 300)),
            (
                "tokens",
                f"{found['tokens']}, of which the last {found['tail_tokens']} in {where}",
            ),
            ("blocks", f"{there} of {len(found['blocks'])} stored, {units.size(bytes_of_blocks)}"),
            *_state(found["state"]),
            ("file", f"{found['path']} ({units.size(found['bytes'])})"),
            ("codec", f"{found['codec']}, {found['fidelity']}"),
            *_max_kl(notes),
            ("pinned", "yes" if found["pinned"] else "no"),
        ],
    )
    for message in _tables(notes.get("messages")):
        text = " ".join(str(message.get("content", "")).split())
        role = printable(str(message.get("role", "")), 20)
        app.out.text(f"  {role:10}{text[:66]}{'…' if len(text) > 66 else ''}")


def _tables(value: Any) -> list[dict[str, Any]]:
    """Notes are any JSON: of what should be a list of tables, the tables."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _state(state: dict[str, Any] | None) -> list[tuple[str, str]]:
    if state is None:
        return []
    return [("state", units.size(state["bytes"]) if state["stored"] else "not stored any more")]


def _block(app: App, found: dict[str, Any]) -> None:
    lines = [(found["kind"], found["block"]), ("file", found["path"])]
    if found["lost"]:
        lines.append(("lost", found["lost"]))
    if "start" in found:
        last = found["start"] + found["tokens"] - 1
        here = f"{found['start']} to {last}" if found["tokens"] else f"none: at {found['start']}"
        lines += [
            ("parent", found["parent"]),
            ("positions", here),
            ("size", units.size(found["bytes"])),
            ("codec", f"{found['codec']}, {found['fidelity']}"),
            ("reachable", "yes" if found["reachable"] else "no: one before it is missing"),
        ]
    _lines(app, lines)


def _lines(app: App, lines: list[tuple[str, str]]) -> None:
    for label, value in lines:
        app.out.text(f"{label:10}{value}")
