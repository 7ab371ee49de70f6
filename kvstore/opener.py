"""The bytes of a block's or session's file, opened: digest, then record, then whether it is believed."""

from __future__ import annotations

from collections.abc import Callable

from kvsnap.formats.block import BlockFile, parse_block
from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import check_file_digest
from kvsnap.kvstore.trust import Trust


class Opener:
    """Of one store. Everything that reads a block goes through here, so that no path believes more
    than another."""

    def __init__(
        self, trust: Trust | None = None, prepare: Callable[[Codec], None] = lambda codec: None
    ) -> None:
        """`prepare` makes a calibrated codec able to decode: rows are compared with a signature."""
        self.trust, self._prepare = trust, prepare

    def block(self, buffer: memoryview) -> BlockFile:
        """Raises `Damaged` (`Untrusted` where the store has a trust list) or `Unsupported`."""
        digest = check_file_digest(buffer)
        block = parse_block(buffer)
        if self.trust is not None:
            self._prepare(block.codec)
            self.trust.check_block(block, digest)
        return block
