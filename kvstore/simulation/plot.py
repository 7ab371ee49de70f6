"""Hit rate against capacity, as a picture. matplotlib is imported only here, when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvsnap.kvstore.simulation.replay import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """A line a policy and routing. No limit is drawn where all distinct blocks have room, which is
    the same."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "kvsnap"}):  # equal rows give equal bytes
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for label, points in lines(rows).items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel("capacity of a replica, blocks")
        axes.set_ylabel("block hit rate")
        axes.set_title(f"{rows[0].workload}: {rows[0].requests} requests")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, metadata=metadata)


def lines(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """What a line is called → its points, from the smallest capacity on."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        label = f"{row.policy}, {row.routing}" if row.routing else row.policy
        capacity = row.distinct_blocks if row.capacity_blocks is None else row.capacity_blocks
        found.setdefault(label, []).append((capacity, row.block_hit_rate))
    return {label: sorted(points) for label, points in found.items()}
