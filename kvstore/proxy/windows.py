"""Rows of windowed layers that a slot file leaves out, of a server that has them all (`--swa-full`).

Of a sliding window llama.cpp writes what the next token sees (src/llama-kv-cache.cpp, `state_write`): the
last window. What stands before comes out a window at a time: the server is asked for the front of the
same prompt in the same slot, which cuts the slot there and computes one token, and the slot is saved
once more. In the end it holds the front alone; what was there is in the store then.

So it is done for what the store lacks: of a long prompt once, of later turns only where they are longer
than a window. A slot that lost rows (others share its cache) shows that in its file: nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.llama_server_slot import SlotFile
from kvsnap.formats.interchange.llamacpp import State
from kvsnap.formats.names import TokenIds

Cut = Callable[[TokenIds], Awaitable[SlotFile]]
"""Cut the slot to these tokens, the front of what it holds, and save it."""


async def with_rows_from(slot: SlotFile, start: int, window: int, cut: Cut) -> SlotFile:
    """The same slot with the rows of its windowed layers from token `start` on. Raises `Damaged` where the
    server does not have them any more, and what `cut` raises."""
    rows = _whole(slot, window)
    parts = [(*rows.k, *rows.v)]
    while (first := int(rows.positions[0])) > start:
        # At least half of the slot is kept: of one that loses more, the server makes a copy in
        # memory, and may put another of its copies in its place.
        ids = slot.token_ids[: max(first, window)]
        found = await cut(ids)
        if not np.array_equal(found.token_ids, ids):
            raise _lost()
        rows = _whole(found, window)
        count = first - int(rows.positions[0])
        # Copies: a view would keep the whole file in memory.
        parts.append(tuple(layer[:count].copy() for layer in (*rows.k, *rows.v)))
    layers = [np.concatenate(pieces[::-1]) for pieces in zip(*parts, strict=True)]
    positions = np.arange(first, len(slot.token_ids), dtype=np.int64)
    k, v = tuple(layers[: len(rows.k)]), tuple(layers[len(rows.k) :])
    return replace(slot, window=replace(rows, positions=positions, k=k, v=v))


def _whole(slot: SlotFile, window: int) -> State:
    """Its windowed rows, if they are all there."""
    rows, tokens = slot.window, len(slot.token_ids)
    if rows is None or len(rows.positions) < max(1, min(window, tokens)):
        raise _lost()
    return rows


def _lost() -> Damaged:
    return Damaged(
        "the server's slot lost rows of its sliding windows: its new blocks are not kept"
    )
