"""`gc`: bring a store within its budget, and tidy what crashes left. Plan, show, apply.

Eviction while saving uses the same plan; here the whole folder is looked at as well, for
files without a row (their writer was killed between rename and commit) and rows without a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.errors import StoreError, StoreFull
from kvsnap.kvstore import files
from kvsnap.kvstore.eviction import Plan
from kvsnap.kvstore.rebuild import MISSING, Found, adopt, block_names, read_ours
from kvsnap.kvstore.session_list import SEALED_SESSION
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class GcReport:
    """`kept_bytes`: what the store takes afterwards. `short_bytes`: what is still over the budget,
    because all else is pinned, in use, or a session's own file. `adopted`: files without a row
    that count from now on; `vanished`: rows whose file was gone. `sessions_cut`: sessions of whose
    chain the end went."""

    evicted: int
    freed_bytes: int
    kept_bytes: int
    dry_run: bool
    short_bytes: int
    unfinished: int
    quarantined: int
    adopted: int
    vanished: int
    sessions_cut: tuple[str, ...]


def gc(
    store: Store,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> GcReport:
    """Evict until the store is within its budget. With `dry_run` no file is deleted or written; the
    report is that of the plan which would be applied."""
    if not dry_run and store.place.root.exists():
        try:
            with store.index.transaction() as db:
                db.execute("UPDATE counters SET value = value + 1 WHERE name = 'clock'")
        except StoreFull:
            store.space.eviction.clear_a_full_disk()
    adopted, vanished = _look(store, must=not dry_run)
    plan = store.space.eviction.plan(store.space.missing())
    cut = _sessions_cut(store, plan)
    used = store.space.used()
    evicted, freed = len(plan.blocks), plan.bytes
    if not dry_run:
        done = store.space.eviction.apply(plan, progress)
        evicted, freed = len(done.blocks), done.bytes
    return GcReport(
        evicted=evicted,
        freed_bytes=freed,
        kept_bytes=used - freed if dry_run else store.space.used(),
        dry_run=dry_run,
        short_bytes=max(0, plan.short),
        unfinished=_gone(plan.unfinished, dry_run),
        quarantined=_gone(plan.quarantined, dry_run),
        adopted=adopted,
        vanished=vanished,
        sessions_cut=cut,
    )


def _gone(planned: list[tuple[Path, int]], dry_run: bool) -> int:
    return sum(dry_run or not files.stands(path) for path, _ in planned)


def _look(store: Store, *, must: bool) -> tuple[int, int]:
    """Bring the index up to what is there, or the plan would be another one: what holds nothing any
    more, what tmp/ and sessions take, and `_compare`. A dry run does without where it cannot write.
    """
    with contextlib.suppress(StoreError):
        store.pins.compare(delete=must)
        with store.index.transaction() as db:
            store.holds.end_dead(db)
    store.space.unfinished.recount()
    store.listing.refresh()
    try:
        return _compare(store)
    except StoreError:
        if must:
            raise
        return 0, 0


def _compare(store: Store) -> tuple[int, int]:
    """Make rows and files agree; (files adopted, rows whose file is gone)."""
    orphans, vanished = list[Found](), 0
    for byte in range(256):
        low, high = bytes([byte]) + bytes(31), bytes([byte]) + b"\xff" * 31
        there = block_names(store.place, byte)
        sql = "SELECT name, lost FROM blocks WHERE name BETWEEN ? AND ?"
        rows = dict(store.index.query(sql, [low, high]))
        for name, lost in rows.items():
            if lost is None and name not in there:
                vanished += _lose(store, name)
        for name in there:
            if rows.get(name, MISSING) is not None:
                found = read_ours(store.place.block(name))
                orphans += [found] if found is not None else []
    adopted = 0
    for found in sorted(orphans, key=lambda orphan: orphan.record.start):
        with store.index.transaction() as db:
            row = store.index.find(found.record.name)
            # Else its writer has just added it, or another gc has adopted and evicted it, or is at it.
            still = files.file_size(store.place.block(found.record.name)) == found.size
            going = store.space.unfinished.is_going(db, found.record.name)
            if still and not going and (row is None or row.lost):
                adopt(store.index, db, found, store.block_size)
                adopted += 1
    return adopted, vanished


def _lose(store: Store, name: bytes) -> bool:
    """Whether the row has no file, which is looked at again: it may have been published, or evicted,
    since the folder was listed."""
    with store.index.transaction() as db:
        row = store.index.find(name)
        gone = row is not None and row.lost is None and not files.stands(store.place.block(name))
        if gone:
            store.index.lose(db, name, MISSING)
    return gone


def _sessions_cut(store: Store, plan: Plan) -> tuple[str, ...]:
    """Sessions of whose stored blocks some go: the last of them does, as only leaves go."""
    going = {victim.name.hex() for victim in plan.blocks}
    if not going:
        return ()
    return tuple(
        facts.name or SEALED_SESSION
        for path, _, facts in store.listing.refresh()
        if store.listing.last_stored(path, facts) in going
    )
