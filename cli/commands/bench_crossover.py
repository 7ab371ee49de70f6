"""`kvsnap bench crossover`: computing against restoring, at several lengths, from every tier."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli import units
from kvsnap.cli.inputs import engine_options
from kvsnap.cli.main import App
from kvsnap.formats.errors import UsageError

if TYPE_CHECKING:
    from kvsnap.formats.names import TokenIds
    from kvsnap.kvstore.measure.crossover import Crossover

EXAMPLES = """\b
Examples:
  kvsnap bench crossover --model m.gguf
  kvsnap bench crossover --model m.gguf --lengths 64,512,4096 --plot crossover.svg
"""
WITHIN = 50.0
"""Seconds of computing with the lengths that are chosen here: about a minute with all the rest."""
MAX_LENGTHS = 32
TIERS = {
    "memory": "from memory",
    "disk": "from disk, in the page cache",
    "cold": "from disk, cold",
}


@click.command("crossover", epilog=EXAMPLES)
@click.option(
    "--lengths",
    metavar="N,N,…",
    help="Tokens, rounded up to blocks. Default: 64, then four times as many while it takes less"
    " than a minute.",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw it: .png or .svg.",
)
@click.option("--no-store", is_flag=True, help="Only print: resume will not go by it.")
@click.option(
    "--codec",
    metavar="ID",
    default="zstd",
    show_default=True,
    help="How rows become bytes: raw or zstd, both exact.",
)
@engine_options
@click.pass_obj
def command(
    app: App, /, lengths: str | None, plot: Path | None, no_store: bool, **options: Any
) -> None:
    """From which length on restoring is cheaper than computing.

    Prefill and restore of the same tokens are timed in turns: from host memory, from disk in the
    page cache, and from disk cold. The result is stored for the model and its settings, and resume
    computes what would clearly be slower to restore. The store's own blocks are not touched.
    """
    from kvsnap.cli.engine import Loaded, require_engine
    from kvsnap.cli.plot_crossover import draw
    from kvsnap.kvstore.pictures import check_plot

    asked = parse_lengths(lengths)
    if plot is not None:
        check_plot(plot)
    require_engine(options["engine"])
    from kvsnap.kvstore import break_even
    from kvsnap.kvstore.measure.crossover import DEFAULT_LENGTHS

    loaded = Loaded(app, options, _room(options["model"], asked or DEFAULT_LENGTHS), None, None)
    try:
        found = _measure(app, loaded, asked, options["codec"])
        if not no_store:
            break_even.write(loaded.store.place, found.key, found.record)
    finally:
        loaded.close()
    if plot is not None:
        draw(found, plot)
    _report(app, found, stored=not no_store)


def parse_lengths(text: str | None) -> list[int]:
    """Numbers of tokens from "64,256"; none where the option is not there."""
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_LENGTHS or not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise UsageError(
            f"--lengths is {text!r}",
            f"give up to {MAX_LENGTHS} numbers of tokens, e.g. 64,256,1024",
        )
    return [int(part) for part in parts]


def _room(model: Path, lengths: Sequence[int]) -> int:
    """Tokens that the context must have; the trained length bounds it later."""
    from kvsnap.engines.gguf import check_model

    check_model(model)
    return max(lengths) + 2**10  # rounding up to blocks of any sensible size


def _measure(app: App, loaded: Any, lengths: list[int], codec: str) -> Crossover:
    from kvsnap.cli import interrupt
    from kvsnap.cli.progress import bar
    from kvsnap.kvstore.measure.crossover import DEFAULT_LENGTHS, measure

    chosen = lengths or [n for n in DEFAULT_LENGTHS if n <= loaded.engine.capacity]
    app.out.say("measuring; let nothing else run meanwhile")
    with bar(app.out, "measuring", "tokens") as draw:

        def step(done: int, total: int) -> None:
            interrupt.check()
            draw(done, total)

        return measure(
            loaded.store,
            loaded.engine,
            _ids(loaded, max(chosen)),
            chosen,
            model=loaded.model,
            codec=codec,
            within=None if lengths else WITHIN,
            step=step,
        )


def _ids(loaded: Any, longest: int) -> TokenIds:
    """Ids of a real text, over and over: rows of noise would not compress as real ones do."""
    import numpy as np

    text = resources("kvsnap.samples").joinpath("system-prompt.md").read_text("utf-8")
    ids: TokenIds = loaded.engine.tokenize(text, first=True)
    count = -(-longest // loaded.store.block_size) * loaded.store.block_size
    return np.resize(ids, min(count, loaded.engine.capacity))


def _report(app: App, found: Crossover, *, stored: bool) -> None:
    record, prefill = found.record, dict(found.record.prefill.points)
    restore = {tier: dict(curve.points) for tier, curve in record.restore.items()}
    if app.out.as_json:
        app.out.json(
            {
                "model": record.model,
                "codec": record.codec,
                "block_size": found.block_size,
                "rounds": found.rounds,
                "lengths": [
                    {
                        "tokens": tokens,
                        "compute_seconds": prefill[tokens],
                        "restore_seconds": {tier: restore[tier][tokens] for tier in restore},
                    }
                    for tokens in found.tokens
                ],
                "cheaper_from": {tier: found.cheaper_from(tier) for tier in restore},
                "notes": list(found.notes),
                "stored": stored,
            }
        )
    rows = [
        [
            str(tokens),
            units.seconds(prefill[tokens]),
            *(
                f"{units.seconds(restore[tier][tokens])} ({_times(prefill[tokens], seconds)})"
                for tier in restore
                for seconds in [restore[tier][tokens]]
            ),
        ]
        for tokens in found.tokens
    ]
    app.out.table(["tokens", "compute", *(TIERS[tier] for tier in restore)], rows)
    for tier in restore:
        app.out.text(f"{TIERS[tier]}: {_cheaper(found, tier)}")
    for note in found.notes:
        app.out.say(note)
    if stored:
        app.out.say("stored: resume goes by it for this model and its settings")


def _times(computing: float, restoring: float) -> str:
    ratio = computing / restoring
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _cheaper(found: Crossover, tier: str) -> str:
    tokens = found.cheaper_from(tier)
    if tokens is None:
        return f"restoring is not cheaper up to {found.tokens[-1]} tokens, the longest measured"
    if tokens == found.tokens[0]:
        return f"restoring is always cheaper, from {tokens} tokens (the shortest measured) on"
    return f"restoring is cheaper from {tokens} tokens on"
