"""Why the block that a prompt goes on with is not there, though it was once: damage, or eviction.

An evicted block leaves no row; that it was there is known where a session of the same tenant still
names it in its chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Root
from kvsnap.formats.names import ZERO_PARENT, TokenIds, common_prefix
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.explain.dry_match import Found, Loss
from kvsnap.kvstore.index import big_endian
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
        "SELECT name, tokens, lost FROM blocks WHERE start = ? AND reachable = 0"
        " AND parent IS (SELECT id FROM blocks WHERE name = ?)"
        " AND root = (SELECT id FROM roots WHERE root_id = ?) AND tokens"
    )
    values = [start, parent, root.root_id, tokens]
    after = store.index.query(f"{where} >= ? ORDER BY tokens LIMIT 1", values)
    before = store.index.query(f"{where} < ? ORDER BY tokens DESC LIMIT 1", values)
    return [*after, *before]


def evicted_next(session: Session, ids: TokenIds, found: Found) -> Evicted | None:
    """A session whose chain goes on as the prompt does, into blocks that are not there any more."""
    depth = found.tokens // session.store.block_size
    for record in _candidates(session, found, depth):
        if record.root_id != found.root.root_id or len(record.chain) <= depth:
            continue
        common = min(common_prefix(record.token_ids, ids), record.tail_start)
        if common > found.tokens and session.store.index.find(record.chain[depth]) is None:
            return Evicted(record.chain[depth].hex(), record.name, common)
    return None


def _candidates(session: Session, found: Found, depth: int) -> Iterator[SessionRecord]:
    """Sessions of the tenant that lack blocks: the one at hand, then those that end in a block of
    the prompt, then the ones saved last."""
    if session.stored is not None:
        yield session.stored.record
    wanted = {name.hex() for name in found.names[depth:]}
    store = session.store
    listed = [
        (facts.last not in wanted, -status.st_mtime_ns, path)
        for path, status, facts in store.listing.refresh()
        if path.parent.name == session.tenant_id
        and facts.blocks > depth
        and not store.index.is_reachable(bytes.fromhex(facts.last))
    ]
    for _, _, path in sorted(listed)[:READ_AT_MOST]:
        with contextlib.suppress(KvsnapError, OSError):
            yield read_session(path).record
