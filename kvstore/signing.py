"""Sign what is stored here already: blocks in place, a session as its next revision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from kvsnap.formats.block import sign_block
from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged, Sealed, Vanished
from kvsnap.formats.identity import layout_of
from kvsnap.formats.sealed import parse_sealed, seal
from kvsnap.formats.session import SessionFile, pack_session
from kvsnap.formats.signature import SigningKey
from kvsnap.kvstore import files
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import Trust


def sign_blocks(
    store: Store,
    names: Sequence[bytes],
    trust: Trust,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Put this machine's signature on stored blocks that nobody in `trust` signed, after their rows
    were compared with their digests; how many those were. A person says with it that they were
    computed by someone to be trusted. Damaged ones are set aside, and raise nothing."""
    done = 0
    for number, name in enumerate(names):
        row = store.index.find(name)
        if row is not None and row.lost is None and not trust.lists(row.signer):
            done += _sign(store, name, trust)
        progress(number + 1, len(names))
    return done


def sign_session(store: Store, session: SessionFile, trust: Trust) -> SessionFile:
    """The session, where a trusted key signed it; else its next revision, signed and stored. Raises
    `Damaged` where its tail is, `Vanished` where it was saved meanwhile."""
    try:
        trust.check_session(session)
        return session
    except Damaged:
        pass
    record = dataclasses.replace(session.record, revision=session.record.revision + 1)
    layout = layout_of(record.identity)
    packed = pack_session(record, session.codec, layout, session.tail_rows(), trust.key)
    with store.sessions.draft_of(record, packed) as draft:
        written = store.sessions.publish(draft, (session.record.revision, session.file_digest))
    if written is None:
        raise Vanished(f"session {record.name!r} was saved while it was signed", "try again")
    store.sessions.sync(record)
    return written


def _sign(store: Store, name: bytes, trust: Trust) -> bool:
    path = store.place.block(name)
    before = files.size_and_change(path)
    try:
        buffer = files.read_whole(path)
        block = Opener(keys=store.opener.keys).block(buffer)
        store.calibrations.prepare(block.codec)
        block.check_content()
        if block.record.name != name:
            raise Damaged("the file is another block's")
    except (FileNotFoundError, Sealed):
        return False  # evicted meanwhile, or another tenant's
    except OSError as error:
        raise files.store_error(error, path, "read") from error
    except Damaged as error:
        store.blocks.set_aside(name, error.what)
        return False
    if trust.lists(block.signer) and block.signed:
        # Whoever signed it died between rename and row.
        with store.index.transaction() as db:
            store.index.correct(db, name, len(buffer), block.signer)
        return False
    packed = _signed(store, buffer, trust.key) if block.sealed else sign_block(buffer, trust.key)
    with store.space.write(packed, name) as room:
        files.sync_all([room.path])  # what it replaces may be synced, and part of a saved session
        with store.index.transaction() as db:
            row = store.index.find(name)
            if row is None or row.lost is not None or files.size_and_change(path) != before:
                return False  # stored anew meanwhile
            store.index.correct(db, name, packed.size, trust.key.public)
            room.publish(db, path)
    return True


def _signed(store: Store, buffer: memoryview, key: SigningKey) -> Packed:
    """A sealed block, the file in it signed."""
    sealed = parse_sealed(buffer)
    tenant = store.opener.keys.require(sealed.clear.tenant_id)
    packed = sign_block(sealed.open(tenant), key)
    return seal(packed, dataclasses.replace(sealed.clear, signer=key.public), tenant)


def unsigned_blocks(store: Store, trust: Trust) -> list[bytes]:
    """Stored blocks that no trusted key signed, by what their files say."""
    sql = "SELECT name, signer FROM blocks WHERE lost IS NULL ORDER BY start"
    return [name for name, signer in store.index.query(sql) if not trust.lists(signer)]
