"""`kvsnap bench codecs`: bytes, speed and loss of every codec."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from importlib.resources import as_file
from importlib.resources import files as resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsnap.cli import units
from kvsnap.cli.bundled import bundled_model, bundled_model_option
from kvsnap.cli.main import App
from kvsnap.formats.errors import NotFound, Unsupported, UsageError

if TYPE_CHECKING:
    from kvsnap.formats.codecs import Codec
    from kvsnap.kvstore.measure.bench_codecs import CodecBench

EXAMPLES = """\b
Examples:
  kvsnap bench codecs
  kvsnap bench codecs --model m.gguf --texts my-texts --plot codecs.png
  kvsnap bench codecs --codec q8 --codec "q4;step=0.3" --engine llama.cpp
"""
STEPS = {"kvtc": [f"kvtc;step={step}" for step in (0.0037, 0.008, 0.014, 0.02)]}
"""Of what is measured by default, in the place of the codec's own default."""


@click.command("codecs", epilog=EXAMPLES)
@bundled_model_option
@click.option(
    "--texts",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder of .txt and .md files. Default: five texts that come with kvsnap.",
)
@click.option(
    "--codec",
    "codecs",
    metavar="ID",
    multiple=True,
    help="May be given several times. Default: all that can be used.",
)
@click.option(
    "--context",
    metavar="N",
    type=click.IntRange(min=64),
    default=1536,
    show_default=True,
    help="Tokens of each text that are stored and restored.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(min=2),
    default=256,
    show_default=True,
    help="Tokens after them whose distributions are compared.",
)
@click.option(
    "--engine",
    type=click.Choice(["float32", "llama.cpp"]),
    default="float32",
    show_default=True,
    help="float32 is free of the engine's own noise, and needs the extra hf.",
)
@click.option(
    "--dtype",
    type=click.Choice(["f16", "bf16", "f32"]),
    default="f16",
    show_default=True,
    help="Element type of the rows (float32 only; llama.cpp has its own).",
)
@click.option(
    "--outliers",
    is_flag=True,
    help="Scale a few channel pairs of K by 30 in every head, and Q against it: the same model, with"
    " the outliers that some have (float32 only).",
)
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Draw ratio against KL: .png or .svg.",
)
@click.pass_obj
def command(
    app: App,
    model: Path | None,
    texts: Path | None,
    codecs: tuple[str, ...],
    context: int,
    tokens: int,
    engine: str,
    dtype: str,
    outliers: bool,
    plot: Path | None,
) -> None:
    """Bytes, speed and loss of every codec, on a model's own next tokens.

    Each text's first tokens are stored as block files and restored; the next ones are evaluated on
    the restored rows, and their distributions compared with those on the exact rows.
    """
    from kvsnap.cli.progress import in_turn
    from kvsnap.kvstore.measure.bench_codecs import bench_codecs, read_texts
    from kvsnap.kvstore.pictures import check_plot

    if plot is not None:
        check_plot(plot)
    if outliers and engine != "float32":
        raise UsageError("--outliers changes the model's weights", "leave --engine at float32")
    path = model or bundled_model()
    with contextlib.ExitStack() as stack:
        default = stack.enter_context(as_file(resources("kvsnap.samples") / "texts"))
        read = read_texts(texts or default)
        runner, tokenize = _runner(path, engine, dtype, context + tokens, stack)
        if outliers:
            runner.scale_keys()
        chosen = _codecs(app, codecs, path, outliers)
        with in_turn(app.out, {"texts": "texts", "codecs": "codecs"}, "") as step:
            found = bench_codecs(
                runner,
                chosen,
                {name: tokenize(text) for name, text in read.items()},
                context=context,
                held_out=tokens,
                step=step,
            )
    title = path.name + (", with outlier channels" if outliers else "")
    _report(app, found, title, engine, dtype)
    if plot is not None:
        from kvsnap.cli.plot_codecs import draw

        draw(found, plot, title)


def _runner(
    path: Path, engine: str, dtype: str, tokens: int, stack: contextlib.ExitStack
) -> tuple[Any, Any]:
    """What is measured with, and how it makes tokens of text."""
    if engine == "float32":
        from kvsnap.kvstore.measure.float32 import Float32Model

        model = Float32Model(path, dtype.upper())
        return model, model.tokenize
    from kvsnap.cli.engine import require_engine

    require_engine("llama.cpp")
    from kvsnap.engines import LlamaCpp
    from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
    from kvsnap.kvstore.measure.live import LiveModel

    llm = load_llama(path, LoadOptions(flash_attn=True), tokens)
    stack.callback(llm.close)
    adapter = LlamaCpp(llm)
    return LiveModel(adapter), lambda text: adapter.tokenize(text, first=True)


def _codecs(app: App, asked: Sequence[str], model: Path, outliers: bool) -> list[Codec]:
    """Those that were asked for, else all; calibrated ones with the store's newest calibration of
    the model, or left out with a warning."""
    from kvsnap.engines.gguf import weights_digest
    from kvsnap.formats.codecs import chosen_codec, known_codecs
    from kvsnap.kvstore.measure.float32 import OUTLIERS

    texts = [t for own in known_codecs() for t in STEPS.get(own, (own,))]
    found: list[Codec] = []
    with app.store() as store:
        for text in asked or texts:
            try:
                codec = chosen_codec(text)
            except Unsupported as error:
                if asked:
                    raise UsageError(error.what, error.hint) from error
                app.out.warn(f"{text} is left out: {error.what}")
                continue
            try:
                weights = weights_digest(model, store.file_digest) + OUTLIERS * outliers
                codec = store.calibrations.complete(codec, weights)
            except (NotFound, Unsupported) as error:
                if asked:
                    raise
                app.out.warn(f"{text} is left out: {error.what}")
                continue
            found.append(codec)
    return found


def _report(app: App, found: CodecBench, title: str, engine: str, dtype: str) -> None:
    if app.out.as_json:
        app.out.json(
            {"model": title, "engine": engine, "dtype": dtype, **dataclasses.asdict(found)}
        )
        return
    for name, reason in found.skipped.items():
        app.out.warn(f"{name} is left out: {reason}")
    app.out.text(
        f"{title}, {engine}, rows of {dtype}: {units.count(len(found.texts), 'text')}, {found.context} tokens stored in blocks of"
        f" {found.block_size}, {found.held_out} compared"
    )
    app.out.text()
    columns = ["codec", "ratio", "bits", "enc", "dec", "all", "KL", "p99", "top-1", "ppl"]
    app.out.table(
        columns,
        [
            [
                _short(r.codec),
                f"{r.loss.ratio:.2f}x",
                f"{r.loss.bits_per_value:.2f}",
                f"{r.speed.encode:.2f}",
                f"{r.speed.decode:.2f}",
                f"{r.speed.decode_all_cores:.2f}",
                f"{r.loss.kl_mean:.1e}",
                f"{r.loss.kl_p99:.1e}",
                f"{100 * r.loss.top1:.1f}%",
                f"{100 * r.loss.ppl_change:+.2f}%",
            ]
            for r in found.results
        ],
    )
    app.out.text()
    app.out.text(
        "enc, dec: GB of rows a second on one core; all: decoding, on all cores."
        f" In the same run a copy runs at {found.copy['copy']:.1f},"
        f" plain zstd-1 decodes at {found.copy['plain_zstd']:.2f}"
        f" ({found.copy['plain_zstd_ratio']:.2f}x)."
    )


def _short(codec: str) -> str:
    """Without the digest of a calibration, which is longer than the rest of the line."""
    head, *fields = codec.split(";")
    return ";".join([head, *(f for f in fields if not f.startswith("calibration="))])
