"""The longest stored prefix of a prompt: whole blocks by galloping, then the best sibling's front.

Models that keep more than rows of every token go on from state checkpoints only: the deepest one
that stands on the stored blocks and whose tokens the prompt goes on with.

The store is closed under parent (and `reachable` says where damage broke that), so presence along a
chain is a step function: galloping finds the step in O(log n) look-ups. What is found is a hint;
reading checks every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.block import STATE
from kvsnap.formats.identity import EXACT, Root
from kvsnap.formats.layout import Layout
from kvsnap.formats.names import ZERO_PARENT, TokenIds, block_name, common_prefix
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.blocks import Blocks
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.index import Index, Row, big_endian
from kvsnap.kvstore.wanted import Wanted

_PARENTS_AT_ONCE = 200
"""Blocks whose checkpoints are looked for in one query, from the end of the chain."""


@dataclass(frozen=True)
class Match:
    """`tokens` at the front of the prompt are stored, in these blocks; the last may be cut. `state`
    is the checkpoint that they end in, where the model needs one."""

    tokens: int
    blocks: tuple[Wanted, ...]
    state: Wanted | None = None
    beyond: int = 0
    """Where the stored blocks end, if that is further than a checkpoint lets the model go on from."""


def chain(
    names: list[bytes], token_ids: TokenIds, block_size: int, count: int | None = None
) -> list[Wanted]:
    """The first `count` blocks of a prompt with what each must say of itself."""
    parents = [ZERO_PARENT, *names]
    return [
        Wanted(name, parents[n], n * block_size, token_ids[n * block_size : (n + 1) * block_size])
        for n, name in enumerate(names[:count])
    ]


def state_at_end(root_key: bytes, names: Sequence[bytes], token_ids: TokenIds, size: int) -> Wanted:
    """The state checkpoint at the end of a sequence, whose filled blocks have these names."""
    return state_at(root_key, names, token_ids, len(token_ids), size)


def state_at(
    root_key: bytes, names: Sequence[bytes], token_ids: TokenIds, position: int, size: int
) -> Wanted:
    """The same after the first `position` tokens."""
    depth = position // size
    parent = names[depth - 1] if depth else ZERO_PARENT
    tail = token_ids[depth * size : position]
    return Wanted(block_name(root_key, parent, tail, STATE), parent, depth * size, tail, STATE)


def longest_prefix(
    blocks: Blocks,
    root: Root,
    names: list[bytes],
    token_ids: TokenIds,
    block_size: int,
    limit: int,
) -> Match:
    """At most `limit` tokens, the last of them perhaps from the front of a sibling block.

    Of a lossy chain only the prompt's own blocks: rows from the front of another one would be coded
    again in the prompt's, and each edit of a chat would add one loss to another.
    """
    depth = _depth(blocks, names, limit // block_size)
    wanted = chain(names, token_ids, block_size, depth)
    tokens = depth * block_size
    if tokens < limit:
        parent = names[depth - 1] if depth else ZERO_PARENT
        own = names[depth] if depth < len(names) else b""
        rest = token_ids[tokens:]
        if own and own not in blocks.misses and blocks.offers(own):
            # The prompt's own, which the limit ends in: all of it is the same. Of sealed blocks no
            # other one can be found.
            sibling: Wanted | None = Wanted(own, parent, tokens, rest[:block_size])
        else:
            sibling = _best_sibling(blocks, root, parent, rest, tokens, block_size)
        if sibling is not None and (root.fidelity == EXACT or sibling.name == own):
            common = min(len(sibling.token_ids), limit - tokens)
            return Match(tokens + common, (*wanted, sibling))
    return Match(tokens, tuple(wanted))


def longest_usable(
    layout: Layout,
    blocks: Blocks,
    root: Root,
    names: list[bytes],
    token_ids: TokenIds,
    block_size: int,
    limit: int,
) -> Match:
    """What a model of this layout can go on from."""
    search = deepest_state if layout.needs_state else longest_prefix
    return search(blocks, root, names, token_ids, block_size, limit)


def deepest_state(
    blocks: Blocks,
    root: Root,
    names: list[bytes],
    token_ids: TokenIds,
    block_size: int,
    limit: int,
) -> Match:
    """The deepest state checkpoint at a position of at most `limit`, and the blocks before it."""
    depth = _depth(blocks, names, limit // block_size)
    parents = [ZERO_PARENT, *names[:depth]]
    while parents:
        some, parents = parents[-_PARENTS_AT_ONCE:], parents[:-_PARENTS_AT_ONCE]
        states = _plain_states(blocks, root, names, token_ids[:limit], block_size, some)
        states += sealed_states(blocks.index, root, token_ids[:limit], some)
        for state in sorted(states, key=lambda state: state.stop, reverse=True):
            if state.name not in blocks.misses:
                found = chain(names, token_ids, block_size, state.start // block_size)
                return Match(state.stop, tuple(found), state, beyond=depth * block_size)
    return Match(0, (), beyond=depth * block_size)


def _plain_states(
    blocks: Blocks,
    root: Root,
    names: list[bytes],
    token_ids: TokenIds,
    block_size: int,
    parents: Sequence[bytes],
) -> list[Wanted]:
    found = []
    for row in blocks.index.states(root.root_id, parents, token_ids):
        count = row.start // block_size
        start = count * block_size  # a file that says another place is read, and found out
        ids = token_ids[start : start + len(row.tokens) // 4]
        if big_endian(ids) == row.tokens:
            parent = names[count - 1] if count else ZERO_PARENT
            found.append(Wanted(row.name, parent, start, ids, STATE))
    return found


def sealed_states(
    index: Index, root: Root, token_ids: TokenIds, parents: Sequence[bytes]
) -> list[Wanted]:
    """Sealed checkpoints that stand on one of the blocks and whose tokens the prompt goes on with
    there. The index does not have their ids: their names are computed, one for each length."""
    found = []
    for parent, start, length in index.sealed_states(root.root_id, parents):
        ids = token_ids[start : start + length]
        name = block_name(root.key, parent, ids, STATE)
        if len(ids) == length and index.is_reachable(name):
            found.append(Wanted(name, parent, start, ids, STATE))
    return found


def _depth(blocks: Blocks, names: list[bytes], whole: int) -> int:
    """How many of a prompt's first `whole` blocks are stored, from the front."""
    whole = min(len(names), whole)
    if blocks.misses:  # the index need not know of them, and galloping could jump over one
        whole = next((n for n, name in enumerate(names[:whole]) if name in blocks.misses), whole)
    return gallop(lambda number: blocks.offers(names[number]), whole)


def tail_reach(
    own: SessionRecord | None,
    root: Root,
    match: Match,
    token_ids: TokenIds,
    limit: int,
    block_size: int,
) -> int:
    """How far a session's own tail brings its prompt, if further than the blocks do; else 0."""
    if own is None or (own.root_id, own.identity) != (root.root_id, root.identity):
        return 0
    if own.state:  # the rows of the tail are in the checkpoint
        return 0
    common = min(common_prefix(own.token_ids, token_ids), limit)
    whole = match.tokens // block_size * block_size
    return common if whole >= own.tail_start and common > max(match.tokens, own.tail_start) else 0


def _best_sibling(
    blocks: Blocks, root: Root, parent: bytes, rest: TokenIds, start: int, block_size: int
) -> Wanted | None:
    """The stored child of `parent` that shares most tokens with `rest`, if any does."""
    best: Wanted | None = None
    for row in _usable_neighbours(blocks, root, parent, big_endian(rest[:block_size])):
        ids = np.frombuffer(row.tokens, ">u4").astype(np.uint32)
        common = common_prefix(ids, rest)
        if common and (best is None or common > len(best.token_ids)):
            best = Wanted(row.name, parent, start, rest[:common])
    return best


def _usable_neighbours(blocks: Blocks, root: Root, parent: bytes, tokens: bytes) -> list[Row]:
    """The nearest children of `parent` either side that no verdict is against: a damaged one that
    could not be set aside must not hide the next."""
    neighbours = blocks.index.neighbours
    if not blocks.misses:
        return neighbours(root.root_id, parent, tokens)
    found: list[Row] = []
    for after in (True, False):
        edge = tokens
        while rows := [
            row for row in neighbours(root.root_id, parent, edge) if (row.tokens >= edge) == after
        ]:
            if rows[0].name not in blocks.misses:
                found += rows
                break
            edge = rows[0].tokens + b"\0" if after else rows[0].tokens
    return found
