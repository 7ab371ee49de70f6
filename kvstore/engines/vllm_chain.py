"""The names of a vLLM request's blocks: its token ids, its salt and its media, under each rank's root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvsnap.engines.vllm_plan import Rank
from kvsnap.formats.extras import media_extra, salt_extra
from kvsnap.formats.identity import Root
from kvsnap.formats.names import ZERO_PARENT, TokenIds, block_name, token_array

_DIGEST = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
"""How vLLM names media by default (VLLM_MM_HASHER_ALGORITHM)."""


class Chain:
    """Names and extras of one request's filled blocks, as far as they were asked for."""

    def __init__(self, request: Any, roots: Mapping[Rank, Root], size: int) -> None:
        self.request, self.roots, self.size = request, roots, size
        self.names: dict[Rank, list[bytes]] = {rank: [ZERO_PARENT] for rank in roots}
        """That of the block before each; so the first is no block's."""
        self.extras: list[bytes] = []

    def reach(self, blocks: int) -> None:
        """Compute names up to so many blocks; the request has their tokens."""
        first = len(self.extras)
        if blocks <= first:
            return
        ids = self.token_ids(first, blocks)
        for number in range(first, blocks):
            self.extras.append(self._extras(number * self.size))
        for rank, root in self.roots.items():
            names = self.names[rank]
            for number in range(first, blocks):
                own = ids[(number - first) * self.size : (number - first + 1) * self.size]
                names.append(block_name(root.key, names[-1], own, self.extras[number]))

    def token_ids(self, first: int, stop: int) -> TokenIds:
        """Of blocks [first, stop)."""
        tokens = self.request.all_token_ids[first * self.size : stop * self.size]
        return token_array(np.array(tokens, dtype=np.int64))

    def _extras(self, start: int) -> bytes:
        """Of the block that begins at a position, in the order of docs/format.md."""
        extras = (
            salt_extra(self.request.cache_salt) if self.request.cache_salt and not start else b""
        )
        for item in self.request.mm_features:
            place = item.mm_position
            if place.offset < start + self.size and place.offset + place.length > start:
                extras += media_extra(item.identifier, place.offset - start)
        return extras


def cannot_name(request: Any, *, trust_media_names: bool = False) -> str:
    """Why a request's blocks have no names of which it is sure what they stand for; empty: they have.

    `trust_media_names`: that media of equal names are equal. A client may choose them (`uuid` of a part
    of a message, an ImageID in EXIF data, which vLLM takes for the content's digest), and a store would
    believe it for ever, of everybody."""
    if request.prompt_embeds is not None:
        return "prompt embeddings have no token ids"
    if request.cache_salt is not None and not _is_text(request.cache_salt):
        return "its cache_salt is no text"
    if request.resumable:
        return "a streaming request's tokens may change"
    if request.pooling_params is not None:
        return "pooling requests are not handled"
    if request.mm_features and not trust_media_names:
        return (
            "its media have names that a client may choose; where none can,"
            ' set "trust_media_names": true'
        )
    for item in request.mm_features:
        if not _DIGEST.fullmatch(item.mm_hash or item.identifier):
            return "its media were given names of their own"
    return ""


def _is_text(salt: str) -> bool:
    """JSON can spell halves of a character, which no encoding has."""
    return not any("\ud800" <= letter <= "\udfff" for letter in salt)
