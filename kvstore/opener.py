"""The bytes of a block's or session's file, opened: digest, seal, record, then whether it is believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvsnap.formats.block import BlockFile, BlockRecord, parse_block
from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged
from kvsnap.formats.sealed import Clear, is_sealed, parse_sealed
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.trust import Trust


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

    def block(self, buffer: memoryview) -> BlockFile:
        """Raises `Damaged` (`Untrusted` where the store has a trust list) or `Unsupported` (`Sealed`
        without the tenant's key)."""
        digest = check_file_digest(buffer)
        block = self._sealed(buffer, digest) if is_sealed(buffer) else parse_block(buffer)
        if self.trust is not None:
            self._prepare(block.codec)
            self.trust.check_block(block, digest)
        return block

    def _sealed(self, buffer: memoryview, digest: str) -> BlockFile:
        sealed = parse_sealed(buffer)
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
