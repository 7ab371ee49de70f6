"""What encryption costs a save and a restore: the same blocks in a plain store and in an encrypted one.

    python tests/bench/encryption.py [--rounds N] [--folder F]

Each way of storing takes its turn in every round, so that a busy moment of the machine meets all of
them; medians of one run are compared. A save goes into a new store each time, down to the device
(--folder says on which; in memory, /dev/shm, what is left is the work of the processor). A restore
reads with every check into fresh memory, from files that are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from synthetic import SHAPES, Filled

import kvsnap
from kvsnap.formats.identity import root_of
from kvsnap.formats.names import chain_names, token_array
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.restore import read_blocks

TENANT = Tenant(os.urandom(32))
BLOCK = 64
WAYS = [(codec, encrypt) for codec in ("raw", "zstd") for encrypt in (False, True)]
TOKENS = {"SmolLM2-135M": 1536, "8B": 1024}


class Kept(Filled):
    """One way of storing a prompt's blocks; `renew` begins with an empty store."""

    def __init__(self, folder: Path, shape: str, codec: str, encrypt: bool) -> None:
        super().__init__(folder, shape, TOKENS[shape], BLOCK, codec)
        self.folder, self.encrypt = folder, encrypt
        self.root = root_of(self.root.identity, TENANT)
        ids = token_array(np.arange(self.tokens))
        self.names = chain_names(self.root.key, ids, BLOCK)
        self.wanted = chain(self.names, ids, BLOCK)

    def renew(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.store = kvsnap.Store(self.folder, encrypt=self.encrypt, capacity="10GB")
        self.store.keys.add(TENANT)
        assert self.store.encrypt == self.encrypt

    def restore(self) -> None:
        out = self.layout.empty(self.tokens)
        done, miss = read_blocks(
            self.store.blocks, self.root, self.wanted, self.layout, out, 0, self.tokens
        )
        assert (done, miss) == (self.tokens, None)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(shape: str, folder: Path, rounds: int) -> None:
    kept = {way: Kept(folder / f"{way[0]}-{way[1]}", shape, *way) for way in WAYS}
    size = sum(array.nbytes for array in kept[WAYS[0]].rows.values())
    saves: dict[tuple[str, bool], list[float]] = {way: [] for way in WAYS}
    restores: dict[tuple[str, bool], list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, one in kept.items():
            one.renew()
            saves[way].append(timed(one.save))
    for _ in range(rounds):
        for way, one in kept.items():
            restores[way].append(timed(one.restore))
    print(f"{shape}, {TOKENS[shape]} tokens, {size / 1e6:.0f} MB of rows, {rounds} rounds")
    for name, found in (("save", saves), ("restore", restores)):
        for codec in ("raw", "zstd"):
            plain, sealed = (median(found[codec, encrypt]) for encrypt in (False, True))
            print(
                f"  {name:7} {codec:4}: plain {size / plain / 1e9:5.2f} GB/s, encrypted"
                f" {size / sealed / 1e9:5.2f} GB/s: {sealed / plain:.2f}x the time"
            )
        plain, sealed = median(found["zstd", False]), median(found["raw", True])
        print(f"  {name:7} by default (plain zstd, encrypted raw): {sealed / plain:.2f}x the time")
    for one in kept.values():
        one.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where the stores are made; default: TMPDIR")
    asked = parser.parse_args()
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            measure(shape, Path(folder), asked.rounds)


if __name__ == "__main__":
    main()
