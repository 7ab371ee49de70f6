"""One session or block, in full, for a person or a script."""

from __future__ import annotations

import re
from typing import Any

from kvsnap.formats.block import KIND, STATE_KIND
from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.formats.identity import parse_identity
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore import files
from kvsnap.kvstore.pins import is_pinned
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_blocks import own_blocks


def describe_session(store: Store, tenant_id: str, name: str) -> dict[str, Any]:
    """A session's record, with which blocks of its chain are there. Raises `NotFound`."""
    session = store.sessions.load(tenant_id, name)
    record = session.record
    path = store.sessions.path(tenant_id, name)
    blocks = [_stored(store, block) for block in record.chain]
    stored = next((n for n, block in enumerate(blocks) if not block["stored"]), len(blocks))
    state = _stored(store, record.state) if record.state else None
    return {
        "session": record.name,
        "path": str(path),
        "revision": record.revision,
        "pinned": is_pinned(store.place.pin(path)),
        "tokens": len(record.token_ids),
        "block_size": record.block_size,
        "blocks": blocks,
        "state": state,
        "stored_tokens": stored * record.block_size,
        "tail_tokens": record.tail_tokens,
        "bytes": files.file_size(path),
        "codec": session.codec.id,
        "fidelity": record.fidelity,
        "root_id": record.root_id,
        "identity": parse_identity(record.identity),
        "notes": dict(record.notes),
        "token_ids": record.token_ids.tolist(),
    }


def _stored(store: Store, name: bytes) -> dict[str, Any]:
    row = store.index.find(name)
    usable = row is not None and row.reachable
    return {"name": name.hex(), "stored": usable, "bytes": row.bytes if row else 0}


def find_pinnable(store: Store, tenant: Tenant | None, text: str) -> str | bytes:
    """A session's name, or the name of the block that begins with `text`. Raises `NotFound`."""
    try:
        store.sessions.require(tenant_id(tenant), text)
    except NotFound:
        return find_block(store, text, tenant)[0]
    return text


def describe_block(store: Store, prefix: str, tenant: Tenant | None = None) -> dict[str, Any]:
    """A block or state checkpoint by (a unique beginning of) its name; `kind` says which. Raises
    `NotFound`, or `UsageError` if not one."""
    store.keys.add(tenant)
    name, lost, reachable, hits, state = find_block(store, prefix, tenant)
    path = store.place.block(name)
    found: dict[str, Any] = {
        "block": name.hex(),
        "kind": STATE_KIND if state else KIND,
        "path": str(path),
        "lost": lost,
        "reachable": bool(reachable),
        "hits": hits,
        "pinned": is_pinned(store.place.pin_of_block(name)),
    }
    try:
        buffer = files.read_whole(path)
    except OSError:
        return found
    block = store.opener.block(buffer)
    return found | {
        "parent": block.record.parent.hex(),
        "start": block.record.start,
        "tokens": len(block.record.token_ids),
        "bytes": len(buffer),
        "codec": block.codec.id,
        "fidelity": block.record.fidelity,
        "content": block.content,
        "root_id": block.record.root_id,
        "identity": parse_identity(block.record.identity),
        "token_ids": block.record.token_ids.tolist(),
    }


def find_block(
    store: Store, prefix: str, tenant: Tenant | None = None
) -> tuple[bytes, str | None, int, int, int]:
    """(name, lost, reachable, hits, state) of the one block or checkpoint whose name begins with
    `prefix`; with a tenant's key among its own ones."""
    if not re.fullmatch(r"[0-9a-f]{4,64}", prefix):
        raise NotFound(
            f"no session or block {prefix!r}", "kvsnap ls shows the sessions that are there"
        )
    low = bytes.fromhex(prefix.ljust(64, "0"))
    high = bytes.fromhex(prefix.ljust(64, "f"))
    rows = store.index.query(
        "SELECT name, lost, reachable, hits, state FROM blocks WHERE name BETWEEN ? AND ?"
        f" AND {own_blocks(store, tenant)} LIMIT 2",
        [low, high],
    )
    if not rows:
        raise NotFound(
            f"no session or block {prefix!r}", "kvsnap ls shows the sessions that are there"
        )
    if len(rows) > 1:
        raise UsageError(f"several blocks begin with {prefix}", "give more of the name")
    name, lost, reachable, hits, state = rows[0]
    return name, lost, reachable, hits, state
