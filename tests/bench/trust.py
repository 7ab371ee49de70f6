"""What a trust list costs, as ratios in one run, page cache warm.

    python tests/bench/trust.py

Restoring blocks with a list, the first time in a process (rows are decoded once more and compared with
what was signed) and again, against restoring them without one; saving them signed against unsigned,
synced; how much longer a signed file is. Keys are made for the run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from synthetic import Filled, best_of

import kvsnap
from kvsnap.formats.signature import new_signing_key
from kvsnap.kvstore.restore import read_blocks
from kvsnap.kvstore.signing_key import VARIABLE as KEY_FILE
from kvsnap.kvstore.trust import VARIABLE as TRUSTED


def believing(trust: bool) -> None:
    """Stores that are opened from now on have a list, or none."""
    os.environ[TRUSTED] = new_signing_key().public if trust else ""


def opened(path: Path, trust: bool, count: int) -> Iterator[kvsnap.Store]:
    """New ones, as so many new processes would have them."""
    believing(trust)
    return iter([kvsnap.Store(path) for _ in range(count)])


def reading(filled: Filled, stores: Iterator[kvsnap.Store]) -> Callable[[], None]:
    out = filled.layout.empty(filled.tokens)

    def read() -> None:
        blocks = next(stores).blocks
        layout, tokens = filled.layout, filled.tokens
        done = read_blocks(blocks, filled.root, filled.wanted, layout, out, 0, tokens)
        assert done == (tokens, None)

    return read


def forever(store: kvsnap.Store) -> Iterator[kvsnap.Store]:
    while True:
        yield store


def saving(folder: Path, shape: str, tokens: int, codec: str, trust: bool) -> Callable[[], None]:
    rounds = iter(range(10**6))

    def save() -> None:
        believing(trust)
        filled = Filled(folder / f"{trust} {next(rounds)}", shape, tokens, 64, codec)
        written = filled.save()
        assert written
        filled.store.close()

    return save


def row(shape: str, tokens: int, codec: str, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides = []
        for trust in (False, True):
            believing(trust)
            filled = Filled(folder / f"{trust}", shape, tokens, 64, codec)
            filled.save()
            sides.append(filled)
        plain, signed = sides
        again = [reading(filled, forever(filled.store)) for filled in sides]
        for read in again:
            read()
        first = [
            reading(filled, opened(filled.store.path, trust, rounds))
            for filled, trust in ((plain, False), (signed, True))
        ]
        a, b, c, d = best_of(rounds, *first, *again)
        unsigned, with_key = best_of(
            max(3, rounds // 3),
            *(saving(folder, shape, tokens, codec, trust) for trust in (False, True)),
        )
        sizes = [
            sum(filled.store.place.block(name).stat().st_size for name in filled.names)
            for filled in sides
        ]
        size = sum(array.nbytes for array in plain.rows.values())
        growth = (sizes[1] - sizes[0]) / len(plain.names)
        print(
            f"| {shape}, {tokens} tokens, {codec} | {len(plain.names)}, {size / 1e6:.0f} MB"
            f" | {a * 1e3:.1f} ms | {b / a:.2f}x | {d / c:.2f}x | {unsigned * 1e3:.0f} ms"
            f" | {with_key / unsigned:.2f}x"
            f" | {growth:.0f} bytes, {100 * (sizes[1] / sizes[0] - 1):.2f} % |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as keys:
        os.environ[KEY_FILE] = f"{keys}/signing.pem"
        print(
            "| | blocks | restore, no list | first, with a list | again | save, no list | signed"
            " | a block longer by |"
        )
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
        for shape, tokens in (("SmolLM2-135M", 1536), ("8B", 2048)):
            for codec in ("raw", "zstd"):
                row(shape, tokens, codec, options.rounds)
