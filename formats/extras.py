"""Tagged records in a block's name besides token ids: what serving engines mix into theirs.

See docs/format.md, "Extras". A block with extras is never a block of the same tokens without.
"""

from __future__ import annotations

import struct

from blake3 import blake3

from kvsnap.formats.names import TokenIds, extra, token_array

PAGE_HASH = extra("page hash", b"")
"""`token_ids` are the words of a hash that the engine computed over the page's tokens and all before
them, for an engine that gives no token ids. The check for collisions is that of the hash, no more."""


def salt_extra(salt: str) -> bytes:
    """Of the first block, where a request asks to be kept apart from those of another salt. The salt
    itself does not stand in the file."""
    digest = blake3(salt.encode(), derive_key_context="kvsnap cache salt").digest()
    return extra("salt", digest)


def media_extra(identifier: str, offset: int) -> bytes:
    """Of each block with tokens that stand for an image, sound or video: the item's full digest, as
    the engine gives it, and where it begins, counted from the block's first token."""
    return extra("media", struct.pack("<q", offset) + identifier.encode())


def page_hash_words(digest: str) -> TokenIds:
    """A hash of 256 bits in hexadecimal as the 8 words that stand for token ids. Raises `ValueError`
    for anything else: no shorter one may stand for them."""
    data = bytes.fromhex(digest)
    if len(data) != 32:
        raise ValueError(f"a page hash has 64 hexadecimal digits, not {len(digest)}")
    return token_array(list(struct.unpack("<8I", data)))
