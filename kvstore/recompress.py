"""Store a session's blocks by another codec, from its stored exact ones; no engine is needed.

A lossy codec makes another chain, under the root of its fidelity; the exact blocks stay until room
is needed, for whoever shares them. Of state checkpoints only the one at the end goes along. A lossless one rewrites the files under their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsnap.formats.codecs import DEFAULT_CODEC, Codec, get_codec
from kvsnap.formats.errors import NotFound, PartlyDone, UsageError
from kvsnap.formats.identity import (
    EXACT,
    Root,
    layout_of,
    parse_identity,
    root_of,
    with_fidelity,
)
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import chain_names
from kvsnap.formats.rowset import check_codec
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.match import chain, state_at_end
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.session_version import NextVersion
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss, Wanted


@dataclass(frozen=True, kw_only=True)
class RecompressReport:
    """`bytes_before` and `bytes_after` are those of the chain's block files."""

    session: str
    blocks: int
    blocks_written: int
    bytes_before: int
    bytes_after: int
    codec: str
    fidelity: str


def recompress(
    store: Store,
    name: str,
    codec: Codec,
    tenant: Tenant | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RecompressReport:
    """Raises `UsageError` for a session that is lossy already, `NotFound` where the session or one
    of its blocks is not there, `PartlyDone` where it was saved by somebody meanwhile."""
    return try_again(lambda: _recompress(store, name, codec, tenant, progress))


def _recompress(
    store: Store,
    name: str,
    codec: Codec,
    tenant: Tenant | None,
    progress: Callable[[int, int], None],
) -> RecompressReport:
    store.keys.add(tenant)
    session = store.sessions.load(tenant_id(tenant), name)
    record = session.record
    weights = str(parse_identity(record.identity).get("weights"))
    codec = store.calibrations.complete(codec, weights)
    store.calibrations.require(codec)
    check_codec(codec, layout_of(record.identity))
    if record.fidelity != EXACT:
        raise UsageError(
            f"session {name!r} is of fidelity {record.fidelity} already: coding it again would add"
            " one loss to another",
            "save its prompt anew with --codec",
        )
    before = root_of(record.identity, tenant)
    if before.root_id != record.root_id:
        raise UsageError(
            f"session {name!r} belongs to another tenant", "give its --tenant-key-file"
        )
    after = root_of(with_fidelity(record.identity, codec.fidelity), tenant)
    size, layout = record.block_size, layout_of(record.identity)
    wanted = chain(chain_names(before.key, record.token_ids, size), record.token_ids, size)
    target = chain(chain_names(after.key, record.token_ids, size), record.token_ids, size)
    tail = store.sessions.tail_rows(
        session
    )  # raises where it is damaged, before anything is written
    names = [block.name for block in target]
    new_state = state_at_end(after.key, names, record.token_ids, size)
    state = _state(store, before, record, layout)
    bytes_before = _bytes(store, wanted)
    written = list[bytes]()
    with store.holds.lease() as old, store.holds.lease() as new:
        if wanted and not old.keep(wanted[-1].name):
            raise _missing(name, "it was evicted")

        def put() -> int:
            for number, (source, goal) in enumerate(zip(wanted, target, strict=True)):
                rows = layout.in_blocks.empty(size)
                try:
                    store.blocks.read_into(before, source, layout.in_blocks, rows, slice(0, size))
                except Miss as miss:
                    raise _missing(name, str(miss)) from miss
                anew = not codec.lossy
                if store.blocks.put(after, goal, codec, layout, rows, new, anew=anew):
                    written.append(goal.name)
                progress(number + 1, len(wanted))
            if state is not None and codec.lossy:
                store.blocks.put(after, new_state, get_codec(DEFAULT_CODEC), layout, state, new)
                store.sync([new_state.name])
            return len(target)

        if codec.lossy:
            changed = dataclasses.replace(
                record,
                identity=after.identity,
                fidelity=after.fidelity,
                root_id=after.root_id,
                revision=record.revision + 1,
                chain=tuple(names),
                state=new_state.name if record.state else b"",
            )
            started_from = (record.revision, session.file_digest)
            version = NextVersion(changed, get_codec(DEFAULT_CODEC), layout, tail, started_from)
            if version.replace(store, put)[0] is None:
                raise PartlyDone(
                    f"session {name!r} was saved by another process meanwhile, and stays so",
                    "recompress it again",
                )
            version.sync(store)
        else:
            store.sync([block.name for block in target[: put()]])
    return RecompressReport(
        session=name,
        blocks=len(wanted),
        blocks_written=len(written),
        bytes_before=bytes_before,
        bytes_after=_bytes(store, target),
        codec=codec.id,
        fidelity=after.fidelity,
    )


def _state(store: Store, root: Root, record: SessionRecord, layout: Layout) -> Rows | None:
    """Rows of the checkpoint at the session's end, where it has one that is there."""
    if not record.state:
        return None
    wanted = state_at_end(root.key, record.chain, record.token_ids, record.block_size)
    try:
        return store.blocks.read_state(root, wanted, layout)
    except Miss:
        return None


def _missing(name: str, reason: str) -> NotFound:
    return NotFound(
        f"session {name!r} cannot be recompressed: {reason}", "save its prompt again first"
    )


def _bytes(store: Store, blocks: Sequence[Wanted]) -> int:
    rows = [store.index.find(block.name) for block in blocks]
    return sum(row.bytes for row in rows if row is not None)
