"""Blocks and state checkpoints of one small hybrid model, put into a store without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvsnap.formats.block import pack_block
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.container import Packed
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Array, Group, Layout, Plane
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore.match import chain, state_at_end
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

SIZE = 16
SPAN = 20
LAYOUT = Layout(
    groups=(
        Group(
            name="full",
            layers=1,
            planes=(Plane(name="k", kind="elements", dtype="F16", row=(1, 4), source_type="f16"),),
        ),
        Group(
            name="window",
            layers=1,
            span=SPAN,
            planes=(Plane(name="k", kind="rows", dtype="U8", row=(18,), source_type="q4_0"),),
        ),
        Group(
            name="recurrent",
            layers=2,
            span=0,
            planes=(Plane(name="r", kind="pages", dtype="U8", row=(24,), source_type="f32"),),
        ),
    )
)
ROOT = root_of(
    Identity(
        family="f", weights="w", architecture="hybrid", layout=LAYOUT, rope=None, block_size=SIZE
    )
)


def blocks_of(token_ids: TokenIds) -> list[Wanted]:
    """The filled blocks of a prompt."""
    return chain(chain_names(ROOT.key, token_ids, SIZE), token_ids, SIZE)


def state_at(token_ids: TokenIds, position: int) -> Wanted:
    """The checkpoint after the first `position` tokens of a prompt."""
    ids = token_ids[:position]
    return state_at_end(ROOT.key, chain_names(ROOT.key, ids, SIZE), ids, SIZE)


def noise(wanted: Wanted) -> dict[str, Array]:
    """Rows that look random and are the same for equal positions."""
    record = wanted.record(ROOT)
    rows = record.part(LAYOUT).empty(record.ranges(LAYOUT))
    for array in rows.values():
        array[...] = np.random.default_rng(wanted.stop).integers(0, 250, array.shape)
    return rows


def packed(wanted: Wanted) -> Packed:
    """Its file, uncompressed."""
    return pack_block(wanted.record(ROOT), get_codec("raw"), LAYOUT, noise(wanted))


def put(store: Store, *wanted: Wanted) -> None:
    """Store them, each after its parent."""
    for each in wanted:
        store.blocks.put(ROOT, each, get_codec("raw"), LAYOUT, noise(each))


def put_all(store: Store, token_ids: TokenIds, states: Sequence[int]) -> None:
    """Store all blocks of a prompt, and checkpoints at those positions."""
    put(store, *blocks_of(token_ids), *(state_at(token_ids, position) for position in states))


def lose(store: Store, wanted: Wanted) -> None:
    """Delete a file, and let the store notice."""
    store.place.block(wanted.name).unlink()
    store.blocks.set_aside(wanted.name, "the file is missing")


def touch(store: Store, wanted: Wanted) -> None:
    """Let a request's reuse end in it."""
    store.index.count_request(wanted.name, 1, 1)
    store.index.write_notes()
