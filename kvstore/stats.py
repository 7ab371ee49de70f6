"""Numbers about a store: sizes, sharing, hits. Nothing here walks the blocks; the state checkpoints,
of which there are few, are walked."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import parse_identity
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_blocks import own_blocks

_STATES_ON = "(SELECT COUNT(*) FROM blocks s WHERE s.parent = b.id AND s.state = 1)"
_STATES_AS_LEAVES = f"""
SELECT (SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks WHERE state = 1 AND children = 0 AND {{of}})
  - (SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks b
       WHERE id IN (SELECT parent FROM blocks WHERE state = 1) AND children = {_STATES_ON} AND {{of}})
"""
"""What checkpoints add to the sum over leaves: each is one, and the last block of a chain is none
where one stands on it."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """`bytes` counts what the budget counts: all files of blocks and sessions, unfinished ones and
    quarantine. `codecs`: files of blocks and checkpoints by codec. `bytes_saved_by_sharing`: what
    the chains of all sessions, and the stored chains without one, would take more if none shared a
    block (of a damaged chain, as long as it was); checkpoints aside. `leased`: calls that hold
    blocks now. `unreachable`, `evicted_blocks`: checkpoints included.
    The last four are counted for all tenants together: None in what one of them is told."""

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
    requests: int | None
    reused_tokens: int | None
    computed_tokens: int | None
    evicted_blocks: int | None


def stats(store: Store, tenant: Tenant | None = None) -> Stats:
    """From the index's counts; only session files that it does not know yet are read. With a tenant's
    key of what is stored under it alone; `bytes` then has neither unfinished files nor quarantine."""
    store.keys.add(tenant)
    own_id, of = tenant.tenant_id if tenant else None, own_blocks(store, tenant)
    sessions = store.listing.refresh(own_id)
    query = store.index.query
    totals = query(f"SELECT root, codec, blocks, bytes FROM totals WHERE blocks > 0 AND {of}")
    codecs: Counter[str] = Counter()
    for _, codec, number, _ in totals:
        codecs[codec] += number
    counters = dict(query("SELECT name, value FROM counters")) if tenant is None else {}
    count = f"COUNT(*) FROM blocks WHERE lost IS NULL AND {of}"
    unreachable = query(f"SELECT {count} AND reachable = 0")
    states = Counter[str](dict(query(f"SELECT codec, {count} AND state = 1 GROUP BY codec")))
    holds = _holds(store, own_id, of)
    of_files = sum(size for *_, size in totals) + sum(status.st_size for _, status, _ in sessions)
    return Stats(
        blocks=codecs.total() - states.total(),
        states=states.total(),
        bytes=store.space.used() if tenant is None else of_files,
        sessions=len(sessions),
        pinned=holds["pin"],
        leased=holds["lease"],
        models=_models(store, {root for root, *_ in totals}),
        codecs=dict(codecs - states),
        bytes_saved_by_sharing=_saved_by_sharing(store, [facts.last for *_, facts in sessions], of),
        budget_bytes=store.budget.capacity,
        budget_source=store.budget.source,
        min_free_bytes=store.budget.min_free,
        unreachable=unreachable[0][0],
        requests=counters.get("requests"),
        reused_tokens=counters.get("reused_tokens"),
        computed_tokens=counters.get("computed_tokens"),
        evicted_blocks=counters.get("evicted_blocks"),
    )


def _holds(store: Store, tenant_id: str | None, of: str) -> Counter[str]:
    """Pins and leases by kind; of a tenant's sessions, and on its blocks."""
    sql, values = "SELECT kind, COUNT(*) FROM holds WHERE until > ?", list[object]([time.time()])
    if tenant_id is not None:
        sql += f" AND (block IN (SELECT id FROM blocks WHERE {of}) OR owner BETWEEN ? AND ?)"
        values += [f"{tenant_id}/", f"{tenant_id}0"]
    return Counter[str](dict(store.index.query(f"{sql} GROUP BY kind", values)))


def _models(store: Store, roots: set[int]) -> int:
    """Models and settings: one that is stored in several fidelities counts once."""
    found = set[str | int]()
    for number, identity in store.index.query("SELECT id, identity FROM roots"):
        if number in roots:
            with contextlib.suppress(Damaged):
                identity = str(sorted((parse_identity(identity) | {"fidelity": ""}).items()))
            found.add(identity or number)  # of a sealed one no more is known
    return len(found)


def _saved_by_sharing(store: Store, last_blocks: list[str], of: str) -> int:
    """The sum over all chains minus what is stored.

    The index keeps that sum over the leaves; `_STATES_AS_LEAVES` takes the checkpoints out of it.
    Sessions are added whose chain is another's, or ends before a leaf: each is a chain too, but the
    first that ends at a leaf is that leaf's.
    """
    query = store.index.query
    if of == "1":
        chains = query("SELECT value FROM counters WHERE name = 'leaf_chain_bytes'")[0][0]
    else:
        leaves = f"SELECT COALESCE(SUM(chain_bytes), 0) FROM blocks WHERE children = 0 AND {of}"
        chains = query(leaves)[0][0]
    chains -= query(_STATES_AS_LEAVES.format(of=of))[0][0]
    sql = f"SELECT chain_bytes, children - {_STATES_ON} FROM blocks b WHERE name = ?"
    for last, times in Counter(filter(None, last_blocks)).items():
        for size, followers in query(sql, [bytes.fromhex(last)]):
            chains += size * (times - (followers == 0))
    stored = query(f"SELECT COALESCE(SUM(bytes), 0) FROM totals WHERE {of}")[0][0]
    of_states = "SELECT COALESCE(SUM(bytes), 0) FROM blocks WHERE state = 1 AND lost IS NULL"
    stored -= query(f"{of_states} AND {of}")[0][0]
    return max(0, int(chains - stored))
