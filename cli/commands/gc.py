"""`kvsnap gc`: evict until the store is within its budget, and tidy up; or sweep a remote."""

from __future__ import annotations

import dataclasses

import click

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.cli.remote import opened, remote_option
from kvsnap.formats.errors import UsageError

EXAMPLES = """\b
Examples:
  kvsnap gc --capacity 20GB --dry-run
  kvsnap gc --min-free 5GB
  kvsnap gc --remote s3://team-kv/prod --dry-run
"""


@click.command("gc", epilog=EXAMPLES)
@click.option("--min-free", metavar="SIZE", help="Free space to leave on the disk.")
@remote_option
@click.option(
    "--grace",
    metavar="DAYS",
    type=click.FloatRange(min=0.0),
    help="With --remote: what is younger stays, a push may be about to name it. Default: 7.",
)
@click.option("--dry-run", is_flag=True, help="Show what would go; delete nothing.")
@click.pass_obj
def command(
    app: App, min_free: str | None, remote: str | None, grace: float | None, dry_run: bool
) -> None:
    """Evict the least recently used blocks until the store is within its budget.

    Only blocks that nothing stored follows go, so shared prefixes stay longest. Pinned sessions and
    blocks in use stay; session files always do. --capacity is the budget of this run; see
    KVSNAP_CAPACITY and kvsnap.json for a lasting one.

    With --remote: remove files there that no pushed session names and that are older than --grace.
    """
    if remote is not None:
        _sweep(app, remote, grace, dry_run, min_free)
        return
    if grace is not None:
        raise UsageError("--grace is for a remote", "add --remote URL")
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


def _sweep(app: App, url: str, grace: float | None, dry_run: bool, min_free: str | None) -> None:
    from kvsnap.cli.progress import in_turn
    from kvsnap.kvstore.sharing.sweep import GRACE_DAYS, sweep

    days = GRACE_DAYS if grace is None else grace
    if not days >= 0:  # NaN passes click's range, and everything would be older
        raise UsageError(f"--grace is {days}", "give days, like 7 or 0.5")
    if min_free is not None or "capacity" in app.settings:
        raise UsageError(
            "a remote has no budget: --capacity and --min-free are for the store",
            "leave them away, or --remote",
        )
    with opened(url) as remote, in_turn(app.out, {"sweep": "sweep"}, "files") as step:
        report = sweep(
            remote,
            grace_days=days,
            dry_run=dry_run,
            progress=lambda done, total: step("sweep", done, total),
        )
        where = remote.url
    if app.out.as_json:
        app.out.json(dataclasses.asdict(report))
    would = "would go" if dry_run else "went"
    keep = "keeps" if report.sessions == 1 else "keep"
    app.out.text(
        f"{units.count(report.removed_files, 'file')} of {where} {would},"
        f" {units.size(report.freed_bytes)}; {units.count(report.sessions, 'session')} {keep}"
        f" {units.count(report.kept_files, 'file')}, {units.size(report.kept_bytes)}"
    )
    if report.young_files:
        young = f"{units.count(report.young_files, 'file')}, {units.size(report.young_bytes)}"
        app.out.say(f"{young}, that no session names may go when they are {days:g} days old")
    if report.foreign_files:
        app.out.say(f"{units.count(report.foreign_files, 'file')} are not kvsnap's and stay")
