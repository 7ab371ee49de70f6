"""Whether a block that a remote has says that these are its rows, by a signature that is believed.

It is the header that is looked at, not the rows: one that lies is found by whoever reads the block, and
by `verify`. What is looked for here is a block that somebody put there before the one to be pushed.
"""

from __future__ import annotations

from kvsnap.formats.container import described_size, header_size, parse_header
from kvsnap.formats.errors import Damaged, NotFound
from kvsnap.formats.manifest import Item, block_key
from kvsnap.formats.sealed import KIND as SEALED
from kvsnap.formats.signature import block_message, signature_of
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.checks import MOST_HEADER
from kvsnap.kvstore.trust import Trust

_USUAL_HEADER = 4096
"""Of a block with some ten planes and an identity of 2 KB; longer ones are asked for once more."""


def is_signed_there(remote: Remote, item: Item, root_id: str, trust: Trust) -> bool:
    """False also where there is nothing, or nothing that can be read."""
    key = block_key(item.name)
    try:
        size = remote.size(key)
        if size is None:
            return False
        head = remote.get_start(key, _USUAL_HEADER)
        start = header_size(head[:8])
        if start > MOST_HEADER:
            return False
        if start > len(head):
            head = remote.get_start(key, start)
        if described_size(head) != size:
            return False
        metadata = parse_header(head[8:start]).get("__metadata__")
        if not isinstance(metadata, dict):
            return False
        if metadata.get("kind") == SEALED:
            # Only who has the tenant's key can have made one that opens; whoever does compares it.
            return metadata.get("name") == item.name.hex() and trust.lists(
                metadata.get("signer", "")
            )
        if metadata.get("content") != item.content.hex():
            return False
        signature = signature_of(metadata)
        message = block_message(item.name, root_id, item.content.hex())
    except (Damaged, NotFound):
        return False
    return signature is not None and trust.lists(signature.signer) and signature.covers(message)
