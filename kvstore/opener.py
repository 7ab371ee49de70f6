"""The bytes of a block's or session's file, opened: digest, seal, record, then whether it is believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvsnap.formats.block import BlockFile, BlockRecord, parse_block
from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.sealed import Clear, is_sealed, parse_sealed
from kvsnap.formats.tenant import NO_TENANT_ID
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.trust import Trust

UNSEALED = "the file is not sealed, as this store asks for"


class Opener:
    """Of one store. Everything that reads a block goes through here, so that no path believes more
    than another."""

    def __init__(
        self,
        trust: Trust | None = None,
        prepare: Callable[[Codec], None] = lambda codec: None,
        keys: Keyring | None = None,
    ) -> None:
        """`prepare` makes a calibrated codec able to decode: rows are compared with a signature."""
        self.trust, self._prepare = trust, prepare
        self.keys = keys if keys is not None else Keyring()

    def block(
        self, buffer: memoryview, owner: str | None = None, *, from_elsewhere: bool = False
    ) -> BlockFile:
        """`owner`: the tenant id of whose block it has to be, where that is known; `from_elsewhere`: it
        is to be sealed yet, where it has to be. Raises `Damaged`
        (`Untrusted` where the store has a trust list) or `Unsupported` (`Sealed` without the tenant's
        key)."""
        digest = check_file_digest(buffer)
        if is_sealed(buffer):
            block = self._sealed(buffer, digest, owner)
        elif self.keys.seals and owner not in (None, NO_TENANT_ID) and not from_elsewhere:
            # Anyone can have written it; a sealed one only who has the key. A miss, and no damage: it
            # may be of before the store was encrypted. The next save writes it anew.
            raise Unsupported(UNSEALED)
        else:
            block = parse_block(buffer)
        if self.trust is not None:
            self._prepare(block.codec)
            self.trust.check_block(block, digest)
        return block

    def _sealed(self, buffer: memoryview, digest: str, owner: str | None) -> BlockFile:
        sealed = parse_sealed(buffer)
        if owner not in (None, sealed.clear.tenant_id):
            # Names are keyed, so nobody else has a block of this name: the file was put there, or its
            # header changed. Whether its key is at hand does not matter.
            raise Damaged("the file is sealed by another tenant's key")
        block = parse_block(sealed.open(self.keys.get(sealed.clear.tenant_id)))
        if clear_of_block(block.record, sealed.clear.tenant_id, block.signer) != sealed.clear:
            raise Damaged("the sealed file holds another block than it says")
        return dataclasses.replace(block, file_digest=digest, sealed=True)


def clear_of_block(record: BlockRecord, tenant_id: str, signer: str) -> Clear:
    """What stands in the clear around a block's or state checkpoint's file."""
    return Clear(
        kind=record.kind,
        tenant_id=tenant_id,
        name=record.name,
        parent=record.parent,
        root_id=record.root_id,
        start=record.start,
        tokens=len(record.token_ids),
        signer=signer,
    )
