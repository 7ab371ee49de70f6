"""What the codecs leave out, and what it would give: the figures behind docs/codecs.md.

.venv/bin/python tests/bench/codec_choices.py

On the bundled model's f16 rows of two texts, blocks of 64 tokens: other levels of zstd, differences
along tokens, zstd on the codes of q8, and q4 without exact sinks. One core; ratios of one run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard

from kvsnap.cli.bundled import bundled_model
from kvsnap.formats.codecs import Stretch, escape, get_codec
from kvsnap.formats.layout import Array
from kvsnap.kvstore.measure.codec_loss import measure_loss, passage
from kvsnap.kvstore.measure.float32 import Float32Model

TEXTS = Path(__file__).parents[2] / "samples" / "texts"
BLOCK, ROUNDS = 64, 3


def least(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def blocks(rows: dict[str, Array]) -> list[Array]:
    tokens = next(iter(rows.values())).shape[1]
    return [
        np.ascontiguousarray(array[:, start : start + BLOCK])
        for start in range(0, tokens, BLOCK)
        for array in rows.values()
    ]


def report(what: str, raw: int, stored: int, seconds: float, doing: str) -> None:
    print(f"{what:44} {raw / stored:5.2f}x  {doing} {raw / seconds / 1e9:.2f} GB/s")


def lossless(parts: list[Array]) -> None:
    raw = sum(part.nbytes for part in parts)
    planes = {
        "": [(part >> 8).astype(np.uint8) for part in parts],
        ", differences along tokens": [
            (np.diff(part.astype(np.uint16), axis=1, prepend=np.uint16(0)) >> 8).astype(np.uint8)
            for part in parts
        ],
    }
    for what, high in planes.items():
        for level in (1, 3, 9) if not what else (1,):
            compress = zstandard.ZstdCompressor(level=level).compress
            seconds = least(lambda c=compress, h=high: [c(plane.tobytes()) for plane in h])
            stored = raw // 2 + sum(len(compress(plane.tobytes())) for plane in high)
            report(f"zstd-{level} on the high byte{what}", raw, stored, seconds, "encodes")


def on_codes_of_q8(model: Float32Model, rows: dict[str, Array]) -> None:
    codec = get_codec("q8")
    coded, raw, plain, small = [], 0, 0, 0
    for name, (_, plane) in model.layout.planes().items():
        for start in range(BLOCK, rows[name].shape[1], BLOCK):
            part = np.ascontiguousarray(rows[name][:, start : start + BLOCK])
            at = Stretch(name, plane, start)
            stored = codec.encode(at, part)
            frame = zstandard.ZstdCompressor(level=1).compress(stored[".codes"].data.tobytes())
            size = sum(memoryview(tensor.data).nbytes for tensor in stored.values())
            raw, plain = raw + part.nbytes, plain + size
            small += size - stored[".codes"].data.nbytes + len(frame)
            coded.append((at, stored, frame, np.empty_like(part)))

    def decode(inflate: bool) -> None:
        for at, stored, frame, out in coded:
            if inflate:
                zstandard.ZstdDecompressor().decompress(frame)
            codec.decode(at, stored, out)

    report("q8, codes as they are", raw, plain, least(lambda: decode(False)), "decodes")
    report("q8, zstd-1 on the codes", raw, small, least(lambda: decode(True)), "decodes")


def main() -> None:
    model = Float32Model(bundled_model())
    passages = [
        passage(
            model, name, model.tokenize((TEXTS / f"{name}.txt").read_text("utf-8"))[:1792], 1536
        )
        for name in ("licence", "code")
    ]
    rows = dict(passages[0].rows)
    lossless(blocks(rows))
    on_codes_of_q8(model, rows)
    for sinks in (4, 0):
        escape.SINKS = sinks
        loss = measure_loss(model, get_codec("q4"), passages, BLOCK)
        print(
            f"{f'q4, the first {sinks} tokens exact':44} {loss.ratio:5.2f}x  KL {loss.kl_mean:.1e}"
        )


if __name__ == "__main__":
    main()
