"""Numbers about a store: sizes, sharing, hits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvsnap.kvstore import files
from kvsnap.kvstore.store import Store


@dataclass(frozen=True, kw_only=True)
class Stats:
    """`bytes` counts all files of blocks and sessions; `bytes_saved_by_sharing` is what the
    sessions' chains would take more if none shared a block."""

    blocks: int
    bytes: int
    sessions: int
    pinned: int
    leased: int
    models: int
    codecs: dict[str, int]
    bytes_saved_by_sharing: int
    budget_bytes: int | None
    unreachable: int
    requests: int
    reused_tokens: int
    computed_tokens: int


def stats(store: Store) -> Stats:
    """Blocks from the index, sessions from their files."""
    sizes: dict[bytes, int] = {}
    uses: Counter[bytes] = Counter()
    count = pinned = session_bytes = 0
    for listed in store.sessions.list():
        count += 1
        session_bytes += listed.size
        if listed.session is not None:
            pinned += listed.session.record.pinned
            uses.update(listed.session.record.chain)
    for name, times in uses.items():
        if times > 1 and (size := files.file_size(store.place.block(name))):
            sizes[name] = size * (times - 1)
    query = store.index.query
    totals = query(
        "SELECT COUNT(*), COALESCE(SUM(bytes), 0), COUNT(DISTINCT root),"
        " COALESCE(SUM(reachable = 0), 0) FROM blocks WHERE lost IS NULL"
    )[0]
    counters = dict(query("SELECT name, value FROM counters"))
    return Stats(
        blocks=totals[0],
        bytes=totals[1] + session_bytes,
        sessions=count,
        pinned=pinned,
        leased=0,
        models=totals[2],
        codecs=dict(query("SELECT codec, COUNT(*) FROM blocks WHERE lost IS NULL GROUP BY codec")),
        bytes_saved_by_sharing=sum(sizes.values()),
        budget_bytes=None,
        unreachable=totals[3],
        requests=counters.get("requests", 0),
        reused_tokens=counters.get("reused_tokens", 0),
        computed_tokens=counters.get("computed_tokens", 0),
    )
