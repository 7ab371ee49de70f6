"""What every codec costs and gives: bytes, speed and loss, on one model and several texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.measure.codec_loss import Loss, Model, measure_loss, passage
from kvsnap.kvstore.measure.codec_speed import Speed, measure_copy, measure_speed

CONTEXT, HELD_OUT, BLOCK_SIZE = 1536, 256, 64
LONGEST_TEXT = 2**20
"""Characters of one text that are read: the first thousand words are what is used."""


@dataclass(frozen=True, kw_only=True)
class CodecResult:
    codec: str
    loss: Loss
    speed: Speed


@dataclass(frozen=True, kw_only=True)
class CodecBench:
    """`copy`: GB/s of a plain copy and of plain zstd in the same run. `skipped`: texts that are too
    short, and codecs that cannot code these rows, with the reason."""

    texts: tuple[str, ...]
    context: int
    held_out: int
    block_size: int
    token_bytes: int
    results: tuple[CodecResult, ...]
    copy: Mapping[str, float]
    skipped: Mapping[str, str]


def bench_codecs(
    model: Model,
    codecs: Sequence[Codec],
    texts: Mapping[str, TokenIds],
    *,
    context: int = CONTEXT,
    held_out: int = HELD_OUT,
    block_size: int = BLOCK_SIZE,
    step: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> CodecBench:
    """`texts`: name → token ids, of which the first `context` are stored and the next `held_out`
    compared. Raises `UsageError` where none is long enough."""
    context -= (
        context % block_size
    )  # a tail would be kept exactly, and make every codec look better
    skipped = {
        name: f"{len(ids)} tokens, {context + held_out} are needed"
        for name, ids in texts.items()
        if len(ids) < context + held_out
    }
    used = [name for name in texts if name not in skipped]
    if not used:
        raise UsageError(
            f"no text has {context + held_out} tokens", "give longer ones, or a smaller --context"
        )
    passages = []
    for number, name in enumerate(used):
        step("texts", number, len(used))
        passages.append(passage(model, name, texts[name][: context + held_out], context))
    step("texts", len(used), len(used))
    results = []
    for number, codec in enumerate(codecs):
        step("codecs", number, len(codecs))
        results.append(
            CodecResult(
                codec=codec.fidelity if codec.lossy else codec.id,
                loss=measure_loss(model, codec, passages, block_size),
                speed=measure_speed(codec, model.layout, passages[0].rows, block_size),
            )
        )
    step("codecs", len(codecs), len(codecs))
    return CodecBench(
        texts=tuple(used),
        context=context,
        held_out=held_out,
        block_size=block_size,
        token_bytes=model.layout.token_bytes(),
        results=tuple(results),
        copy=measure_copy(model.layout, passages[0].rows, block_size),
        skipped=skipped,
    )


def read_texts(folder: Path) -> dict[str, str]:
    """The `.txt` and `.md` files of a folder, by name. Raises `NotFound` where there are none."""
    paths = sorted(p for p in folder.glob("*") if p.suffix in (".txt", ".md") and p.is_file())
    if not paths:
        raise NotFound(f"no text in {folder}", "give a folder with .txt or .md files")
    return {p.stem: p.read_text("utf-8", "replace")[:LONGEST_TEXT] for p in paths}
