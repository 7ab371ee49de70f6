"""The first token in which a prompt differs from what is stored, with the text around it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvsnap.engines.base import Engine
from kvsnap.engines.text import TextEngine
from kvsnap.formats.names import ZERO_PARENT, TokenIds, common_prefix
from kvsnap.kvstore.explain.dry_match import Found
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.session import Session

AROUND = 8
"""Tokens of context on either side: a line of text."""


@dataclass(frozen=True, kw_only=True)
class Parting:
    """Ids and text on both sides at `position`. Texts are empty for tokens that have none, like
    special ones, and where the engine has no tokenizer. `stored_in` says what was compared."""

    position: int
    token_id: int
    stored_token_id: int
    before: str
    text: str
    after: str
    stored_text: str
    stored_after: str
    stored_in: str


def parting_from_session(session: Session, ids: TokenIds, found: Found) -> Parting | None:
    """Where the prompt leaves the session's own ids, if that is where reuse ends."""
    if session.stored is None:
        return None
    record = session.stored.record
    at = common_prefix(record.token_ids, ids)
    if at != found.tokens or at == min(len(record.token_ids), len(ids)):
        return None
    return _parting(session.engine, ids, at, record.token_ids, 0, f"session {record.name!r}")


def parting_from_sibling(session: Session, ids: TokenIds, found: Found) -> Parting | None:
    """Where the prompt leaves the stored block that shares most tokens with it."""
    size, index = session.store.block_size, session.store.index
    depth = found.tokens // size
    start = depth * size
    parent = found.names[depth - 1] if depth else ZERO_PARENT
    best: Parting | None = None
    for row in index.neighbours(found.root.root_id, parent, big_endian(ids[start : start + size])):
        stored = np.frombuffer(row.tokens, ">u4").astype(np.uint32)
        at = start + common_prefix(stored, ids[start:])
        if at < len(ids) and at - start < len(stored) and (best is None or at > best.position):
            named = f"block {row.name.hex()[:12]}"
            best = _parting(session.engine, ids, at, stored, start, named)
    return best


def _parting(
    engine: Engine, ids: TokenIds, at: int, stored: TokenIds, start: int, stored_in: str
) -> Parting:
    """`stored` are the ids from position `start` on."""
    here, there = ids[at : at + AROUND], stored[at - start : at - start + AROUND]
    return Parting(
        position=at,
        token_id=int(here[0]),
        stored_token_id=int(there[0]),
        before=_text(engine, ids[max(0, at - AROUND) : at]),
        text=_text(engine, here[:1]),
        after=_text(engine, here[1:]),
        stored_text=_text(engine, there[:1]),
        stored_after=_text(engine, there[1:]),
        stored_in=stored_in,
    )


def _text(engine: Engine, ids: TokenIds) -> str:
    """A character cut off by the choice of tokens shows as U+FFFD."""
    if not isinstance(engine, TextEngine):
        return ""
    return engine.detokenize(ids.tolist()).decode("utf-8", "replace")
