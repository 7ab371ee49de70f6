"""What a stored session consists of: the files that another store needs to resume it."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Sequence

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.codecs.base import CalibratedCodec
from kvsnap.formats.errors import KvsnapError, Vanished
from kvsnap.formats.identity import EXACT, root_behind
from kvsnap.formats.manifest import BLOCK, CALIBRATION, NO_CONTENT, SESSION, STATE, Item, Manifest
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.formats.session import SessionFile
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import files
from kvsnap.kvstore.match import sealed_states
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.sharing.sealing import sealed_session_name, size_of_block, size_of_session
from kvsnap.kvstore.store import Store

CREATOR = "KVSNAP_CREATOR"
MOST_WORDS = 200
"""Letters of a creator or a model's name in a manifest, which are for people."""
_PARENTS_AT_ONCE = 200


def manifest_of(store: Store, session: SessionFile, tenant: Tenant | None = None) -> Manifest:
    """Of the files that are here: blocks from the front of the chain as far as they are stored, the
    state checkpoints that stand on them and that the session's tokens pass, its calibration. With
    `tenant` as a remote gets them that is sealed by its key.

    The caller holds a lease. Raises `Vanished` where a file goes meanwhile.
    """
    record = session.record
    items = items_of_chain(store, record.chain, tenant)
    chain = record.chain[: len(items)]
    items += [_item(store, STATE, name, tenant) for name in states_of(store, session, chain)]
    items += _calibration(store, record.fidelity)
    size = files.file_size(store.sessions.path(record.tenant_id, record.name)) or 0
    digest = name = bytes.fromhex(session.file_digest)
    if tenant is not None:
        name = sealed_session_name(tenant, digest)
        size = size if session.sealed else size_of_session(session, size)
    items.append(Item(SESSION, name, 0, size, digest))
    return Manifest(
        name=record.name,
        tenant_id=record.tenant_id,
        root_id=record.root_id,
        fidelity=record.fidelity,
        block_size=record.block_size,
        revision=record.revision,
        tokens=len(record.token_ids),
        created=int(time.time()),
        creator=creator()[:MOST_WORDS],
        model=str(record.notes.get("model", ""))[:MOST_WORDS],
        sealed=tenant is not None,
        items=tuple(items),
    )


def items_of_chain(
    store: Store, chain: Sequence[bytes], tenant: Tenant | None = None
) -> list[Item]:
    """Its blocks as far as they are stored."""
    return [_item(store, BLOCK, name, tenant) for name in chain[: store.index.depth(chain)]]


def creator() -> str:
    """KVSNAP_CREATOR, or user@host: a word for those who list a remote."""
    chosen = os.environ.get(CREATOR)
    if chosen is not None:
        return chosen
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in containers
        user = "?"
    return f"{user}@{socket.gethostname()}"


def _item(store: Store, kind: str, name: bytes, tenant: Tenant | None) -> Item:
    try:
        found = read_record(store.place.block(name))
    except (OSError, KvsnapError) as error:
        store.blocks.has(name)  # sets a file aside that is not the one that was written
        raise Vanished(
            f"block {name.hex()[:12]} cannot be read any more",
            "resume and save the session again: the block is computed anew",
        ) from error
    size = found.size if tenant is None else size_of_block(found, tenant)
    return Item(kind, name, found.stop, size, found.file, found.content or NO_CONTENT)


def states_of(store: Store, session: SessionFile, chain: Sequence[bytes]) -> list[bytes]:
    """Names of the checkpoints that stand on these blocks and that the session's tokens pass."""
    record = session.record
    parents = [ZERO_PARENT, *chain]
    root = root_behind(record.identity, record.root_id, store.keys.get(record.tenant_id))
    names: list[bytes] = []
    for first in range(0, len(parents), _PARENTS_AT_ONCE):
        some = parents[first : first + _PARENTS_AT_ONCE]
        names += [row.name for row in store.index.states(record.root_id, some, record.token_ids)]
        if root is not None:
            sealed = sealed_states(store.index, root, record.token_ids, some)
            names += [state.name for state in sealed]
    return names


def _calibration(store: Store, fidelity: str) -> list[Item]:
    codec = None if fidelity == EXACT else get_codec(fidelity)
    if not isinstance(codec, CalibratedCodec):
        return []
    store.calibrations.require(codec)
    size = files.file_size(store.calibrations.path(codec.calibration)) or 0
    digest = bytes.fromhex(codec.calibration)
    return [Item(CALIBRATION, digest, 0, size, digest)]
