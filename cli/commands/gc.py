"""`kvsnap gc`: evict until the store is within its budget, and tidy up."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli import units
from kvsnap.cli.main import App

EXAMPLES = """\b
Examples:
  kvsnap gc --capacity 20GB --dry-run
  kvsnap gc --min-free 5GB
"""


@click.command("gc", epilog=EXAMPLES)
@click.option("--min-free", metavar="SIZE", help="Free space to leave on the disk.")
@click.option("--dry-run", is_flag=True, help="Show what would go; delete nothing.")
@click.pass_obj
def command(app: App, min_free: str | None, dry_run: bool) -> None:
    """Evict the least recently used blocks until the store is within its budget.

    Only blocks that nothing stored follows go, so shared prefixes stay longest. Pinned sessions and
    blocks in use stay; session files always do. --capacity is the budget of this run; see
    KVSNAP_CAPACITY and kvsnap.json for a lasting one.
    """
    from kvsnap.cli.progress import bar
    from kvsnap.kvstore.gc import gc

    with app.store(min_free=min_free) as store, bar(app.out, "evict", "blocks") as update:
        report = gc(store, dry_run=dry_run, progress=update)
        capacity = store.budget.capacity
    if app.out.as_json:
        app.out.json(dataclasses.asdict(report))
    would = "would go" if dry_run else "went"
    app.out.text(
        f"{units.count(report.evicted, 'block')} {would}, {units.size(report.freed_bytes)};"
        f" {units.size(report.kept_bytes)} of"
        f" {'unlimited' if capacity is None else units.size(capacity)} are taken"
    )
    for number, what in [
        (report.unfinished, f"unfinished files of killed writers {would}"),
        (report.quarantined, f"quarantined files {would}"),
        (report.adopted, "files without a row were added to the index"),
        (report.vanished, "rows had no file any more"),
    ]:
        if number:
            app.out.say(f"{number} {what}")
    for name in report.sessions_cut:
        app.out.say(f"session {name!r} loses the end of its blocks; resuming it computes the rest")
    if report.short_bytes:
        app.out.warn(
            f"{units.size(report.short_bytes)} over the budget: the rest is pinned, in use, or"
            " sessions' own files"
        )
