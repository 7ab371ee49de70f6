"""`kvsnap stats`: sizes, sharing, hits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from kvsnap.cli import units
from kvsnap.cli.foreign import escaped, printable
from kvsnap.cli.inputs import read_tenant, tenant_option
from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError


@click.command("stats")
@click.option(
    "--prometheus",
    is_flag=True,
    help="As Prometheus text, for the textfile collector of node_exporter.",
)
@tenant_option
@click.pass_obj
def command(app: App, prometheus: bool, tenant_key_file: Path | None) -> None:
    """Sizes, sharing, hits; with a tenant's key of what is stored under it."""
    from kvsnap.kvstore.metrics import store_text
    from kvsnap.kvstore.stats import stats

    if prometheus and app.out.as_json:
        raise UsageError("--prometheus and --json exclude each other", "give one of them")
    tenant = read_tenant(tenant_key_file)
    if prometheus and tenant is not None:
        raise UsageError("--prometheus tells of all tenants together", "run it without a key")
    with app.store() as store:
        if prometheus:
            for line in store_text(store).removesuffix("\n").split("\n"):
                app.out.text(escaped(line, r"\\"))  # Prometheus takes no other escape
            return
        found = stats(store, tenant)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(found))
        return
    of_all = [] if found.requests is None else _of_all(found)
    codecs = ", ".join(f"{number} {printable(c)}" for c, number in sorted(found.codecs.items()))
    for label, value in [
        ("store", str(store.path)),
        ("blocks", f"{found.blocks} ({codecs})" if codecs else "0"),
        ("states", str(found.states)) if found.states else ("", ""),
        ("unreachable", str(found.unreachable)) if found.unreachable else ("", ""),
        ("size", units.size(found.bytes)),
        ("capacity", f"{_capacity(found.budget_bytes)} ({found.budget_source})"),
        ("saved by sharing", units.size(found.bytes_saved_by_sharing)),
        ("sessions", f"{found.sessions} ({found.pinned} pinned)"),
        ("models", str(found.models)),
        *of_all,
    ]:
        if label:
            app.out.text(f"{label:18}{value}")


def _of_all(found: Any) -> list[tuple[str, str]]:
    """What is counted for all tenants together."""
    prompt_tokens = found.reused_tokens + found.computed_tokens
    share = f" ({found.reused_tokens / prompt_tokens:.0%})" if prompt_tokens else ""
    return [
        ("evicted", units.count(found.evicted_blocks, "block")),
        ("prompt tokens", f"{prompt_tokens}, {found.reused_tokens} of them reused{share}"),
    ]


def _capacity(size: int | None) -> str:
    return "unlimited" if size is None else units.size(size)
