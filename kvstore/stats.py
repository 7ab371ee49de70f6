"""Numbers about a store: sizes, sharing, hits. Nothing here walks the blocks; the state checkpoints,
of which there are few, are walked."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import parse_identity
from kvsnap.kvstore.store import Store

_STATES_ON = "(SELECT COUNT(*) FROM blocks s WHERE s.parent = b.id AND s.state = 1)"
_STATES_AS_LEAVES = f"""
SELECT (SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks WHERE state = 1 AND children = 0)
  - (SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks b
       WHERE id IN (SELECT parent FROM blocks WHERE state = 1) AND children = {_STATES_ON})
"""
"""What checkpoints add to the sum over leaves: each is one, and the last block of a chain is none
where one stands on it."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """`bytes` counts what the budget counts: all files of blocks and sessions, unfinished ones and
    quarantine. `codecs`: files of blocks and checkpoints by codec. `bytes_saved_by_sharing`: what
    the chains of all sessions, and the stored chains without one, would take more if none shared a
    block (of a damaged chain, as long as it was); checkpoints aside. `leased`: calls that hold
    blocks now. `unreachable`, `evicted_blocks`: checkpoints included."""

    blocks: int
    states: int
    bytes: int
    sessions: int
    pinned: int
    leased: int
    models: int
    codecs: dict[str, int]
    bytes_saved_by_sharing: int
    budget_bytes: int | None
    budget_source: str
    min_free_bytes: int
    unreachable: int
    requests: int
    reused_tokens: int
    computed_tokens: int
    evicted_blocks: int


def stats(store: Store) -> Stats:
    """From the index's counts; only session files that it does not know yet are read."""
    sessions = store.listing.refresh()
    query = store.index.query
    totals = query("SELECT root, codec, blocks, bytes FROM totals WHERE blocks > 0")
    codecs: Counter[str] = Counter()
    for _, codec, number, _ in totals:
        codecs[codec] += number
    sql = "SELECT kind, COUNT(*) FROM holds WHERE until > ? GROUP BY kind"
    holds = dict(query(sql, [time.time()]))
    counters = dict(query("SELECT name, value FROM counters"))
    unreachable = query("SELECT COUNT(*) FROM blocks WHERE reachable = 0 AND lost IS NULL")
    of_states = "SELECT codec, COUNT(*) FROM blocks WHERE state = 1 AND lost IS NULL GROUP BY codec"
    states = Counter[str](dict(query(of_states)))
    return Stats(
        blocks=codecs.total() - states.total(),
        states=states.total(),
        bytes=store.space.used(),
        sessions=len(sessions),
        pinned=holds.get("pin", 0),
        leased=holds.get("lease", 0),
        models=_models(store, {root for root, *_ in totals}),
        codecs=dict(codecs - states),
        bytes_saved_by_sharing=_saved_by_sharing(store, [facts.last for *_, facts in sessions]),
        budget_bytes=store.budget.capacity,
        budget_source=store.budget.source,
        min_free_bytes=store.budget.min_free,
        unreachable=unreachable[0][0],
        requests=counters.get("requests", 0),
        reused_tokens=counters.get("reused_tokens", 0),
        computed_tokens=counters.get("computed_tokens", 0),
        evicted_blocks=counters.get("evicted_blocks", 0),
    )


def _models(store: Store, roots: set[int]) -> int:
    """Models and settings: one that is stored in several fidelities counts once."""
    found = set()
    for number, identity in store.index.query("SELECT id, identity FROM roots"):
        if number in roots:
            with contextlib.suppress(Damaged):
                identity = str(sorted((parse_identity(identity) | {"fidelity": ""}).items()))
            found.add(identity)
    return len(found)


def _saved_by_sharing(store: Store, last_blocks: list[str]) -> int:
    """The sum over all chains minus what is stored.

    The index keeps that sum over the leaves; `_STATES_AS_LEAVES` takes the checkpoints out of it.
    Sessions are added whose chain is another's, or ends before a leaf: each is a chain too, but the
    first that ends at a leaf is that leaf's.
    """
    query = store.index.query
    chains = query("SELECT value FROM counters WHERE name = 'leaf_chain_bytes'")[0][0]
    chains -= query(_STATES_AS_LEAVES)[0][0]
    sql = f"SELECT chain_bytes, children - {_STATES_ON} FROM blocks b WHERE name = ?"
    for last, times in Counter(filter(None, last_blocks)).items():
        for size, followers in query(sql, [bytes.fromhex(last)]):
            chains += size * (times - (followers == 0))
    stored = query("SELECT COALESCE(SUM(bytes), 0) FROM totals")[0][0]
    stored -= query("SELECT COALESCE(SUM(bytes), 0) FROM blocks WHERE state = 1 AND lost IS NULL")[
        0
    ][0]
    return max(0, int(chains - stored))
