"""Store a session's blocks by another codec, from its stored exact ones; no engine is needed.

A lossy codec makes another chain, under the root of its fidelity; the exact blocks stay until room
is needed, for whoever shares them. A lossless one rewrites the files under their names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvsnap.formats.codecs import DEFAULT_CODEC, Codec, get_codec
from kvsnap.formats.errors import NotFound, PartlyDone, UsageError
from kvsnap.formats.identity import EXACT, layout_of, parse_identity, root_of, with_fidelity
from kvsnap.formats.names import chain_names
from kvsnap.formats.rowset import check_codec
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.blocks import Miss, Wanted
from kvsnap.kvstore.match import chain
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.store import Store


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
    tail = session.tail_rows()  # raises where it is damaged, before anything is written
    written, bytes_before = 0, _bytes(store, wanted)
    with store.holds.lease() as old, store.holds.lease() as new:
        if wanted and not old.keep(wanted[-1].name):
            raise _missing(name, "it was evicted")
        for number, (source, goal) in enumerate(zip(wanted, target, strict=True)):
            rows = layout.empty(size)
            try:
                store.blocks.read_into(before, source, layout, rows, slice(0, size))
            except Miss as miss:
                raise _missing(name, str(miss)) from miss
            anew = not codec.lossy
            if store.blocks.put(after, goal, codec, layout, rows, new, anew=anew):
                written += 1
            progress(number + 1, len(wanted))
        store.sync([block.name for block in target])
        if codec.lossy:
            changed = dataclasses.replace(
                record,
                identity=after.identity,
                fidelity=after.fidelity,
                root_id=after.root_id,
                revision=record.revision + 1,
                chain=tuple(block.name for block in target),
            )
            exact = get_codec(DEFAULT_CODEC)
            with store.sessions.draft(changed, exact, layout, tail) as draft:
                version = (record.revision, session.file_digest)
                if store.sessions.publish(draft, version) is None:
                    raise PartlyDone(
                        f"session {name!r} was saved by another process meanwhile, and stays so",
                        "recompress it again",
                    )
            store.sessions.sync(changed)
    return RecompressReport(
        session=name,
        blocks=len(wanted),
        blocks_written=written,
        bytes_before=bytes_before,
        bytes_after=_bytes(store, target),
        codec=codec.id,
        fidelity=after.fidelity,
    )


def _missing(name: str, reason: str) -> NotFound:
    return NotFound(
        f"session {name!r} cannot be recompressed: {reason}", "save its prompt again first"
    )


def _bytes(store: Store, blocks: Sequence[Wanted]) -> int:
    rows = [store.index.find(block.name) for block in blocks]
    return sum(row.bytes for row in rows if row is not None)
