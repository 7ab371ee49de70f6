"""Rows of a given shape without an engine, and a store that holds them as blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvsnap
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.identity import Identity, Root, root_of
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.formats.names import chain_names, token_array
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.wanted import Wanted

SHAPES = {"SmolLM2-135M": (30, 3, 64), "8B": (32, 8, 128)}
"""layers, kv heads, head dim; f16. 8B: Llama 3's, 131,072 bytes a token."""


def layout_of(shape: str) -> Layout:
    layers, heads, dim = SHAPES[shape]
    planes = tuple(
        Plane(name=n, kind="elements", dtype="F16", row=(heads, dim), source_type="f16")
        for n in ("k", "v")
    )
    return Layout(groups=(Group(name="full", layers=layers, planes=planes),))


def rows_of(layout: Layout, tokens: int) -> dict[str, np.ndarray]:
    """Normally distributed halves: their bytes compress about as real K and V do."""
    rows = layout.empty(tokens)
    random = np.random.default_rng(0)
    for array in rows.values():
        array[...] = random.standard_normal(array.shape, np.float32).astype("<f2").view("<u2")
    return rows


class Filled:
    """A store with one chain of blocks of `tokens` tokens."""

    def __init__(
        self, folder: Path, shape: str, tokens: int, block_size: int, codec: str = "raw"
    ) -> None:
        self.layout, self.tokens = layout_of(shape), tokens
        self.store = kvsnap.Store(folder)
        self.root: Root = root_of(
            Identity(
                family="bench",
                weights="none",
                architecture=shape,
                layout=self.layout,
                rope=None,
                block_size=block_size,
            )
        )
        ids = token_array(np.arange(tokens))
        self.names = chain_names(self.root.key, ids, block_size)
        self.wanted: list[Wanted] = chain(self.names, ids, block_size)
        self.rows = rows_of(self.layout, tokens)
        self.codec = get_codec(codec)

    def save(self) -> int:
        """Put all blocks and sync them; bytes written."""
        written = 0
        for block in self.wanted:
            stop = block.start + len(block.token_ids)
            own = {name: array[:, block.start : stop] for name, array in self.rows.items()}
            written += self.store.blocks.put(self.root, block, self.codec, self.layout, own)
        self.store.sync(self.names)
        return written


def best_of(count: int, *works: Callable[[], object]) -> list[float]:
    """Seconds of each work, the least of `count` rounds; rounds alternate, so that a slow moment
    of the machine meets all of them."""
    best = [float("inf")] * len(works)
    for _ in range(count):
        for number, work in enumerate(works):
            started = time.perf_counter()
            work()
            best[number] = min(best[number], time.perf_counter() - started)
    return best
