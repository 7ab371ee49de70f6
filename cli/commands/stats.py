"""`kvsnap stats`: sizes, sharing, hits."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError


@click.command("stats")
@click.option(
    "--prometheus",
    is_flag=True,
    help="As Prometheus text, for the textfile collector of node_exporter.",
)
@click.pass_obj
def command(app: App, prometheus: bool) -> None:
    """Sizes, sharing, hits."""
    from kvsnap.kvstore.metrics import store_text
    from kvsnap.kvstore.stats import stats

    if prometheus and app.out.as_json:
        raise UsageError("--prometheus and --json exclude each other", "give one of them")
    with app.store() as store:
        if prometheus:
            app.out.text(store_text(store), newline=False)
            return
        found = stats(store)
    if app.out.as_json:
        app.out.json(dataclasses.asdict(found))
        return
    prompt_tokens = found.reused_tokens + found.computed_tokens
    share = f" ({found.reused_tokens / prompt_tokens:.0%})" if prompt_tokens else ""
    codecs = ", ".join(f"{number} {codec}" for codec, number in sorted(found.codecs.items()))
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
        ("evicted", units.count(found.evicted_blocks, "block")),
        ("prompt tokens", f"{prompt_tokens}, {found.reused_tokens} of them reused{share}"),
    ]:
        if label:
            app.out.text(f"{label:18}{value}")


def _capacity(size: int | None) -> str:
    return "unlimited" if size is None else units.size(size)
