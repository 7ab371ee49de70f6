"""Why the block that a prompt goes on with is not there, though it was once: damage, or eviction.

An evicted block leaves no row; that it was there is known where a session of the same tenant still
names it in its chain. The same goes for the state checkpoint at a session's end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Root, layout_of
from kvsnap.formats.names import ZERO_PARENT, TokenIds, common_prefix
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.explain.dry_match import Found, Loss
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.match import state_at
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.session_file import read_session
from kvsnap.kvstore.store import Store

READ_AT_MOST = 32
"""Session files, the ones saved last: each is some hundred kB."""


@dataclass(frozen=True)
class Evicted:
    """`block`: the first one that is gone; `session` names it; the two share `tokens` tokens."""

    block: str
    session: str
    tokens: int


def lost_next(store: Store, root: Root, ids: TokenIds, found: Found) -> Loss | None:
    """The stored block after the match that damage keeps from being used, if there is one that
    would have brought the prompt further."""
    size = store.block_size
    depth = found.tokens // size
    if depth < len(found.names):
        row = store.index.find(found.names[depth])
        if row is not None and not row.reachable:
            return Loss(row.name.hex(), row.lost or "a block before it is lost")
    if layout_of(root.identity).needs_state:
        return _lost_state(store, root, ids, found)
    parent = found.names[depth - 1] if depth else ZERO_PARENT
    best, reason = found.tokens - depth * size, None
    for name, tokens, lost in _unreachable_neighbours(
        store, root, parent, depth * size, big_endian(ids[depth * size : (depth + 1) * size])
    ):
        stored = np.frombuffer(tokens, ">u4").astype(np.uint32)
        common = common_prefix(stored, ids[depth * size :])
        if common > best:
            best, reason = common, Loss(name.hex(), lost or "a block before it is lost")
    return reason


def _unreachable_neighbours(
    store: Store, root: Root, parent: bytes, start: int, tokens: bytes
) -> list[tuple[bytes, bytes, str | None]]:
    """As `Index.neighbours` finds them, of the rows that it leaves out."""
    where = (
        "SELECT name, tokens, lost FROM blocks WHERE start = ? AND reachable = 0 AND state = 0"
        " AND parent IS (SELECT id FROM blocks WHERE name = ?)"
        " AND root = (SELECT id FROM roots WHERE root_id = ?) AND tokens"
    )
    values = [start, parent, root.root_id, tokens]
    after = store.index.query(f"{where} >= ? ORDER BY tokens LIMIT 1", values)
    before = store.index.query(f"{where} < ? ORDER BY tokens DESC LIMIT 1", values)
    return [*after, *before]


def _lost_state(store: Store, root: Root, ids: TokenIds, found: Found) -> Loss | None:
    """The deepest checkpoint of the prompt that cannot be used; no other one would have helped."""
    sql = (
        "SELECT name, start + length, lost FROM blocks WHERE state = 1 AND reachable = 0"
        " AND root = (SELECT id FROM roots WHERE root_id = ?) ORDER BY start + length DESC"
    )
    for name, stop, lost in store.index.query(sql, [root.root_id]):
        if not found.tokens < stop < len(ids):
            continue
        # By its name, not its ids: of sealed ones the index has none.
        if state_at(root.key, found.names, ids, stop, store.block_size).name == name:
            return Loss(name.hex(), lost or "a block before it is lost")
    return None


def evicted_next(session: Session, ids: TokenIds, found: Found) -> Evicted | None:
    """A session whose chain goes on as the prompt does, into blocks that are not there any more, or
    to a checkpoint that is not."""
    depth, find = found.tokens // session.store.block_size, session.store.index.find
    for record in _candidates(session, found, depth):
        if record.root_id != found.root.root_id:
            continue
        common, whole = common_prefix(record.token_ids, ids), len(record.token_ids)
        in_blocks = min(common, record.tail_start)
        if in_blocks > found.tokens and find(record.chain[depth]) is None:
            return Evicted(record.chain[depth].hex(), record.name, in_blocks)
        goes_on = found.tokens < whole == common < len(ids)
        if record.state and goes_on and find(record.state) is None:
            return Evicted(record.state.hex(), record.name, whole)
    return None


def _candidates(session: Session, found: Found, depth: int) -> Iterator[SessionRecord]:
    """Sessions of the tenant that lack blocks: the one at hand, then those that end in a block of
    the prompt, then the ones saved last."""
    if session.stored is not None:
        yield session.stored.record
    has_states = layout_of(found.root.identity).needs_state
    wanted = {name.hex() for name in found.names[depth:]}
    store = session.store
    listed = [
        (facts.last not in wanted, -status.st_mtime_ns, path)
        for path, status, facts in store.listing.refresh(session.tenant_id)
        if (
            (has_states and facts.tokens > found.tokens)
            or (facts.blocks > depth and not store.index.is_reachable(bytes.fromhex(facts.last)))
        )
    ]
    for _, _, path in sorted(listed)[:READ_AT_MOST]:
        with contextlib.suppress(KvsnapError, OSError):
            yield read_session(path, store.opener.keys).record
