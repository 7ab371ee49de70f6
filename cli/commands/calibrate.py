"""`kvsnap calibrate`: teach codec kvtc a model."""

from __future__ import annotations

import time
from pathlib import Path

import click

from kvsnap.cli import units
from kvsnap.cli.main import App
from kvsnap.cli.progress import bar

EXAMPLES = """\b
Examples:
  kvsnap calibrate --model m.gguf
  kvsnap save --model m.gguf --messages chat.json --session support --codec kvtc
"""


@click.command("calibrate", epilog=EXAMPLES)
@click.option(
    "--model",
    metavar="M",
    required=True,
    type=click.Path(path_type=Path),
    help="The model: a GGUF file.",
)
@click.option(
    "--texts",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder of .txt and .md files, like what will be stored. Default: documentation and"
    " sources that come with Python.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(min=1024),
    default=36_000,
    show_default=True,
    help="How many to learn from; half of them are written by the model itself.",
)
@click.option("--outliers", is_flag=True, hidden=True, help="For kvsnap bench codecs --outliers.")
@click.pass_obj
def command(app: App, model: Path, texts: Path | None, tokens: int, outliers: bool) -> None:
    """Learn what codec kvtc needs to know of a model, once; a file of the store.

    The model is run in float32 through transformers (extra hf), forwards and backwards. The result
    is named by its digest and stands in the store's folder calibrations/; blocks that it coded need
    it to be read, so it goes along when they are copied by hand.
    """
    from kvsnap.cli import interrupt
    from kvsnap.engines.gguf import weights_digest
    from kvsnap.kvstore.measure.bench_codecs import read_texts
    from kvsnap.kvstore.measure.calibrate import calibrate
    from kvsnap.kvstore.measure.float32 import OUTLIERS, Float32Model
    from kvsnap.kvstore.measure.gather import gather, own_texts

    started = time.perf_counter()
    given = list(read_texts(texts).values()) if texts is not None else own_texts()
    runner = Float32Model(model)
    if outliers:
        runner.scale_keys()
    with app.store() as store:
        weights = weights_digest(model, store.file_digest) + OUTLIERS * outliers
        app.out.say("the model writes half of the text itself, which shows no progress")
        with bar(app.out, "calibrate", "texts") as draw:

            def update(done: int, total: int) -> None:
                interrupt.check()
                draw(done, total)

            samples = gather(runner, given, tokens, update)
        app.out.say("computing components")
        digest = store.calibrations.put(calibrate(weights, samples))
        path = store.calibrations.path(digest)
        size = path.stat().st_size
    count = len(next(iter(samples.values())).positions)
    if app.out.as_json:
        app.out.json(
            {
                "calibration": digest,
                "path": str(path),
                "bytes": size,
                "model": model.name,
                "weights": weights,
                "tokens": count,
                "seconds": time.perf_counter() - started,
            }
        )
    app.out.text(
        f"calibrated {model.name} with {units.count(count, 'token')} in"
        f" {units.seconds(time.perf_counter() - started)}: {digest[:12]}, {units.size(size)}"
    )
    app.out.say("save --codec kvtc uses it from now on")
