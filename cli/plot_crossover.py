"""The plot of `kvsnap bench crossover`. matplotlib is imported here only."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvsnap.formats.errors import NotFound, Unsupported, UsageError

if TYPE_CHECKING:
    from kvsnap.kvstore.measure.crossover import Crossover

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise before anything is measured for a plot that could not be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot is {str(path)!r}", "give a file that ends in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise NotFound(f"no folder {path.parent} for the plot", "make it, or name another file")
    if find_spec("matplotlib") is None:
        raise Unsupported("matplotlib is not installed", "pip install 'kvsnap[plot]'")


def draw(found: Crossover, path: Path) -> None:
    """Seconds over tokens, both logarithmic; a dotted line where a tier becomes cheaper."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    lines = {"compute": [p for p in found.record.prefill.points if p[0] > 1]}
    lines |= {f"restore: {tier}": list(c.points) for tier, c in found.record.restore.items()}
    for label, points in lines.items():
        tokens, seconds = zip(*points, strict=True)
        (line,) = axes.plot(tokens, seconds, marker="o", label=label)
        crossing = found.cheaper_from(label.removeprefix("restore: "))
        if crossing is not None and crossing > found.tokens[0]:
            axes.axvline(crossing, color=line.get_color(), linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="seconds",
        title=f"{found.record.model or 'engine'}: restoring against computing",
    )
    axes.set_xticks(found.tokens, [str(n) for n in found.tokens], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
