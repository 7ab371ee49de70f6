"""Fill an engine's landing with stored rows: blocks are read, checked and decoded in parallel.

Workers share the interpreter only for headers: reading, BLAKE3, zstd and numpy's copies release
the lock. Nothing reaches the engine before every row is checked; a damaged block shortens the
prefix and the rest is tried again without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Layout
from kvsnap.formats.rowset import Targets
from kvsnap.kvstore.blocks import Blocks
from kvsnap.kvstore.wanted import Miss, Wanted

MAX_THREADS = 8
"""Memory bandwidth, not cores, ends the gain: one thread already moves 1-2 GB/s."""


def read_blocks(
    blocks: Blocks,
    root: Root,
    wanted: Sequence[Wanted],
    layout: Layout,
    out: Targets,
    start: int,
    stop: int,
    wait: Callable[[bytes], str | None] | None = None,
) -> tuple[int, Miss | None]:
    """Fill `out`, whose first row is position `start`, up to `stop` from blocks in chain order.
    `wait` returns when a block that is on its way is here, or why it will not be.

    Returns (tokens, miss): `tokens` is how far the rows are right, `stop` unless a block was
    missed. Rows from there on are undefined.
    """
    needed = [w for w in wanted if w.start < stop and w.start + len(w.token_ids) > start]

    def fill(block: Wanted) -> Miss | None:
        low, high = max(start, block.start), min(stop, block.start + len(block.token_ids))
        views = {name: array[:, low - start : high - start] for name, array in out.items()}
        tokens = slice(low - block.start, high - block.start)
        lost = wait(block.name) if wait is not None else None
        if lost is not None:
            return Miss(block.name, lost)
        try:
            blocks.read_into(root, block, layout, views, tokens)
        except Miss as miss:
            return miss
        return None

    threads = min(MAX_THREADS, os.cpu_count() or 1, len(needed))
    if threads <= 1:
        results = [fill(block) for block in needed]
    else:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(fill, needed))
    for block, miss in zip(needed, results, strict=True):
        if miss is not None:
            return max(start, block.start), miss
    return stop, None
