"""The plot of `kvsnap bench crossover`. matplotlib is imported here only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsnap.kvstore.measure.crossover import Crossover


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
