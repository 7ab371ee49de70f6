"""A new session from the front of a stored one. No engine is needed, and no block is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.identity import EXACT, Root, layout_of, root_of
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.session import SessionFile, SessionRecord
from kvsnap.formats.session_name import check_session_name
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import files
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.match import chain, state_at_end
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.session_version import NextVersion
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss


def branch_session(
    store: Store,
    source: SessionFile,
    new_name: str,
    tokens: int | None = None,
    *,
    notes: Mapping[str, Any] | None = None,
    tenant: Tenant | None = None,
) -> SessionRecord:
    """Store the first `tokens` ids of `source` (None: all) as session `new_name`; when this returns
    it survives a power cut.

    `notes` are the new session's; None takes over those of the source where all of it is taken, as
    notes of less would not be true. The rows of the new tail come from the source's tail, or from
    the stored block that the cut falls into.

    Raises `UsageError` where `new_name` is there already or `tokens` is out of range, `Unsupported`
    where the tail's rows cannot be had: the block is evicted or damaged, or coded with loss, whose
    rows must not be coded again.
    """
    check_session_name(new_name)
    record = source.record
    count = len(record.token_ids) if tokens is None else tokens
    if not 0 <= count <= len(record.token_ids):
        raise UsageError(
            f"session {record.name!r} has {len(record.token_ids)} tokens, not {count}",
            "branch at a position within it",
        )
    if notes is None:
        notes = record.notes if count == len(record.token_ids) else {}
    store.keys.add(tenant)
    root = root_of(record.identity, tenant)
    if root.root_id != record.root_id:
        raise UsageError(f"session {record.name!r} belongs to another tenant", "give its tenant")
    layout = layout_of(record.identity)
    start = count // record.block_size * record.block_size
    new = dataclasses.replace(
        record,
        name=new_name,
        revision=1,
        token_ids=record.token_ids[:count],
        chain=record.chain[: start // record.block_size],
        state=_state(record, root, layout, start, count),
        notes=dict(notes),
    )

    def store_it() -> SessionRecord:
        if files.stands(store.sessions.path(new.tenant_id, new_name)):
            raise _is_there(new_name)
        with store.holds.lease() as lease:
            tail = _tail(store, source, root, layout, start, count, lease)
            version = NextVersion(new, source.codec, layout, tail, (0, ""))
            if version.replace(store, lambda: _stored(store, new, lease))[0] is None:
                raise _is_there(new_name)
            version.sync(store)
        return new

    return try_again(store_it)


def _is_there(name: str) -> UsageError:
    return UsageError(f"session {name!r} is there already", "choose another name, or remove it")


def _state(record: SessionRecord, root: Root, layout: Layout, start: int, count: int) -> bytes:
    """Name of the state checkpoint at the cut, stored or not, of a model that needs one."""
    if not layout.needs_state or not count:
        return b""
    names, size = record.chain[: start // record.block_size], record.block_size
    return state_at_end(root.key, names, record.token_ids[:count], size).name


def _stored(store: Store, new: SessionRecord, lease: Lease) -> int:
    """How many blocks of the chain are stored: what was evicted meanwhile is computed again."""
    there = next((n for n, name in enumerate(new.chain) if not store.blocks.has(name)), None)
    stored = len(new.chain) if there is None else there
    if stored:
        lease.keep(new.chain[stored - 1])
    return stored


def _tail(
    store: Store,
    source: SessionFile,
    root: Root,
    layout: Layout,
    start: int,
    count: int,
    lease: Lease,
) -> Rows:
    record = source.record
    if start == count or layout.needs_state:
        return {}
    why = f"the block is of fidelity {record.fidelity}"
    try:
        if start >= record.tail_start:
            rows = store.sessions.tail_rows(source)
            return {name: array[:, : count - start] for name, array in rows.items()}
        if record.fidelity == EXACT:
            number = start // record.block_size
            wanted = chain(list(record.chain), record.token_ids, record.block_size)[number]
            lease.keep(wanted.name)
            rows = layout.empty(count - start)
            store.blocks.read_into(root, wanted, layout, rows, slice(0, count - start))
            return rows
    except (Miss, Damaged) as problem:
        why = str(problem)
    raise Unsupported(
        f"the rows of tokens {start} to {count} cannot be had: {why}",
        f"branch at token {start}, or resume these tokens in a session of the new name",
    )
