"""Block names: the chained hash. `name = BLAKE3(key = root, parent ‖ u32 count ‖ ids ‖ extras)`.

Ids are u32 little-endian; the first block's parent is 32 zero bytes; without extras the field is
empty. Names are the same in every process, on every machine, for ever: see tests/golden.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvsnap.formats.errors import BadTokenIds

TokenIds = NDArray[np.uint32]
ZERO_PARENT = bytes(32)
_EXAMPLE = "give ids as the model's tokenizer gives them, e.g. [1, 504, 2365]"
_COUNT = struct.Struct("<I")


def token_array(token_ids: Sequence[int] | NDArray[Any]) -> TokenIds:
    """Token ids as a contiguous u32 array (the caller's own, where it is one already).

    Raises `BadTokenIds` for floats, bools, negative or too large ids: Python's own equality would
    take True for 1 and 1.0 for 1, and a hash must not.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
            raise BadTokenIds(f"token ids must be a 1-D integer array, not {token_ids.dtype}")
        if token_ids.dtype == np.uint32:
            return np.ascontiguousarray(token_ids)
        wide = token_ids
    else:
        kinds = set(map(type, token_ids))
        for kind in kinds:
            if kind is bool or not issubclass(kind, int | np.integer):
                raise BadTokenIds(f"token ids must be integers, not {kind.__name__}", _EXAMPLE)
        try:
            wide = np.array(token_ids, dtype=np.int64)
        except OverflowError as error:
            raise BadTokenIds("a token id is outside 0..2^32-1", _EXAMPLE) from error
        except (TypeError, ValueError) as error:  # bytes, a set: integers, but not a list of them
            raise BadTokenIds("token ids must be one flat list", _EXAMPLE) from error
        if wide.ndim != 1:
            raise BadTokenIds("token ids must be one flat list", _EXAMPLE)
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > 2**32 - 1):
        raise BadTokenIds("a token id is outside 0..2^32-1", _EXAMPLE)
    return wide.astype(np.uint32)


def keyed_hash(key: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
    """The one hash behind names; tests replace it by a weak one to force a collision."""
    hasher = blake3(key=key)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def block_name(root_key: bytes, parent: bytes, token_ids: TokenIds, extras: bytes = b"") -> bytes:
    """The 32-byte name of one block. `token_ids` must come from `token_array`."""
    ids = token_ids.astype("<u4", copy=False).data.cast("B") if token_ids.size else b""
    return keyed_hash(root_key, (parent, _COUNT.pack(len(token_ids)), ids, extras))


def chain_names(root_key: bytes, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """Names of all filled blocks of a token sequence, in order. Nothing is copied."""
    names: list[bytes] = []
    parent = ZERO_PARENT
    ids = token_ids.astype("<u4", copy=False)
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = block_name(root_key, parent, ids[start : start + block_size])
        names.append(parent)
    return names


def extra(tag: str, payload: bytes) -> bytes:
    """One tagged, length-prefixed record for the extras field: u32 tag length, tag, u32, payload."""
    name = tag.encode("ascii")
    return _COUNT.pack(len(name)) + name + _COUNT.pack(len(payload)) + payload


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """How many ids the two sequences share at the front."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
