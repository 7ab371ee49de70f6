"""`kvsnap bench store`: what the size of a store costs."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvsnap.cli import units
from kvsnap.cli.main import App

if TYPE_CHECKING:
    from kvsnap.kvstore.measure.bench_store import StoreBench

EXAMPLES = """\b
Examples:
  kvsnap bench store --blocks 10000
  kvsnap bench store --blocks 1000000 --keep /big/disk/million
"""
TITLES = {"build": "writing block files", "rebuild": "building the index"}
ROWS = {
    "open": "open, with the first query, in a new process",
    "look_up_all": "look-up of {} tokens, all stored",
    "look_up_half": "look-up of {} tokens, half stored",
    "look_up_none": "look-up of {} tokens, nothing stored",
    "search_all": "  of it without hashing: all stored",
    "search_half": "  of it without hashing: half stored",
    "search_none": "  of it without hashing: nothing stored",
    "put": "put of one block",
    "put_full": "put of one block into a full store",
    "evict": "evict one block",
    "stats": "stats",
    "ls": "ls",
    "plan": "plan of up to 1,000 evictions",
    "gc": "gc --dry-run, which compares files and rows",
}


@click.command("store", epilog=EXAMPLES)
@click.option(
    "--blocks",
    metavar="N",
    type=click.IntRange(2, 10**8),
    default=10_000,
    show_default=True,
    help="Blocks of the store that is built: files of about 2 kB, which take 4 kB of most disks.",
)
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Build it in this new or empty folder, and keep it.",
)
@click.pass_obj
def command(app: App, blocks: int, keep: Path | None) -> None:
    """What the size of a store costs: open, look-up, put, evict, stats, ls.

    A store of many tiny blocks is built, in the shape of chat traffic, beside --store, and removed
    afterwards. The look-up is that of a prompt of the longest chain: 2,000 blocks, or half of a
    small store. The store's own blocks are not touched.
    """
    from kvsnap.cli.progress import in_turn
    from kvsnap.kvstore.measure.bench_store import HOW_BUILT, bench_store, temporary_folder
    from kvsnap.kvstore.place import default_path

    beside = Path(app.store_path).expanduser() if app.store_path else default_path()
    with contextlib.ExitStack() as stack:
        folder = keep or stack.enter_context(temporary_folder(beside.absolute()))
        folder = folder.expanduser().absolute()
        app.out.say(f"building a store in {folder}; let nothing else run meanwhile")
        with in_turn(app.out, TITLES, "blocks") as step:
            found = bench_store(folder, blocks, step)
        _report(app, found, keep, HOW_BUILT)
        if keep is None:
            app.out.say("removing it")


def _report(app: App, found: StoreBench, keep: Path | None, how: str) -> None:
    built = found.built
    if app.out.as_json:
        record = dataclasses.asdict(found)
        record |= {**record.pop("built"), "prompt_tokens": found.prompt_tokens, "how_built": how}
        app.out.json(record | {"folder": str(keep) if keep else None})
        return
    for label, text in [
        ("blocks", f"{built.blocks}, and {units.count(built.sessions, 'session')}"),
        ("files", units.size(built.bytes)),
        ("build", _rate(built.blocks, found.build_seconds)),
        ("", how),
        ("rebuild", _rate(built.blocks, found.rebuild_seconds) + _peak(found.rebuild_peak_bytes)),
        (
            "index",
            f"{units.size(found.index_bytes)}, {found.index_bytes // built.blocks} B a block",
        ),
        ("use", f"the rest of this table{_peak(found.peak_bytes)}"),
    ]:
        app.out.text(f"{label:10}{text}")
    app.out.text()
    app.out.table(
        ["", "median", "p95", "times"],
        [
            [
                title.format(found.prompt_tokens),
                units.seconds(found.timings[what].median),
                units.seconds(found.timings[what].p95),
                str(found.timings[what].count),
            ]
            for what, title in ROWS.items()
        ],
    )


def _rate(blocks: int, seconds: float) -> str:
    return f"{units.seconds(seconds)}, {blocks / seconds:.0f} blocks/s"


def _peak(size: int | None) -> str:
    return "" if size is None else f", at most {units.size(size)} of memory"
