"""A block's file from elsewhere, checked down to its rows before it counts."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import Root
from kvsnap.kvstore.compare import difference
from kvsnap.kvstore.index import Entry, entry_of
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.wanted import Wanted

_DECODING = threading.BoundedSemaphore(os.cpu_count() or 1)
"""They come many at once; to decode more of them than there are cores is memory only."""


@dataclass(frozen=True)
class Foreign:
    """A file that passed every check."""

    codec: Codec
    packed: Packed
    signer: str
    sealed: bool = False

    def entry(self, root: Root, wanted: Wanted) -> Entry:
        """As the index takes it up."""
        whose = root.tenant_id if self.sealed else ""
        return entry_of(wanted.record(root), self.packed.size, self.codec.id, self.signer, whose)


def check_foreign(
    opener: Opener, root: Root, wanted: Wanted, buffer: memoryview, content: str | None = None
) -> Foreign:
    """Check a file down to its decoded rows. `content`: the digest that they were said to have. Most
    of it runs without the interpreter's lock.

    Raises `Damaged` for what is not intact or not the block that is `wanted`, `Unsupported` for another
    version or a codec that is not here.
    """
    with _DECODING:  # with a trust list it is decoded here
        block = opener.block(buffer, root.tenant_id, from_elsewhere=True)
    found = difference(block.record, root, wanted)
    if found is not None or len(block.record.token_ids) != len(wanted.token_ids):
        raise Damaged(found or "the file is another block's")
    if opener.trust is None:
        with _DECODING:
            block.check_content()
    if content not in (None, block.content):
        raise Damaged("its rows are not those that were named")
    packed = Packed((buffer,), len(buffer), block.file_digest)
    return Foreign(block.codec, packed, block.signer, block.sealed)
