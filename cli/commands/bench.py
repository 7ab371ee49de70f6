"""`kvsnap bench`: a group; each measurement is a command in bench_NAME.py."""

from __future__ import annotations

import click

from kvsnap.cli.main import LazyGroup

BENCHES = {
    "codecs": "Bytes, speed and loss of every codec, on a model's own next tokens.",
    "crossover": "From which length on restoring is cheaper than computing.",
    "store": "What the size of a store costs: open, look-up, put, evict, stats, ls.",
}
"""Name → one line of help; cli/commands/bench_NAME.py is imported when the command runs."""


@click.group("bench", cls=LazyGroup, table=BENCHES, prefix="bench_")
def command() -> None:
    """Measure this machine.

    Machines are noisy: read ratios within one run, and let nothing else run meanwhile.
    """
