"""The picture of `kvsnap bench codecs`: ratio against KL. matplotlib is imported here only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvsnap.kvstore.measure.bench_codecs import CodecBench


def draw(found: CodecBench, path: Path, title: str) -> None:
    """One point a lossy codec, both axes logarithmic; lossless ones are lines, as their KL is 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for result in found.results:
        loss = result.loss
        if loss.kl_mean == 0:
            axes.axvline(loss.ratio, linestyle=":", color="grey")
            axes.annotate(result.codec, (loss.ratio, 0.02), xycoords=("data", "axes fraction"))
            continue
        axes.plot(loss.ratio, loss.kl_mean, marker="o", color="C0")
        codec_id, _, fields = result.codec.partition("@")
        step = [field for field in fields.split(";") if field.startswith("step=")]
        label = " ".join([codec_id, *step])
        point = (loss.ratio, loss.kl_mean)
        axes.annotate(label, point, xytext=(5, 5), textcoords="offset points")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="times smaller than the rows (whole files)",
        ylabel="KL of next-token distributions, nats",
        title=title,
    )
    axes.grid(alpha=0.3, which="both")
    figure.savefig(path)
