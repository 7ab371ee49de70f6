"""vLLM's blocks on CPUs, as its connectors gather them: token by token, and no token's own.

An engine's cache of a layer is [blocks, heads, block, 2 * head_dim]. What connectors write are the
slots of a sequence one after the other, [tokens, heads, 2 * head_dim]. On CPUs these are not K and V of
a token: the bytes of one block and head are

    K transposed [head_dim, block] | V [block, head_dim]

(vLLM 0.32.0 on CPUs, found by value: decoded so, layer 0 differs from transformers' by the rounding of
bf16, 0.05; each token cut in halves, by 17.9). The size of a block is not in the
bytes, and a wrong one that divides the tokens is not noticed by a size. Caches on other devices have
other layouts, of equal sizes too, that were never seen.
"""

from __future__ import annotations

import numpy as np

from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array


def from_slots(slots: Array, block: int) -> tuple[Array, Array]:
    """K and V [tokens, heads, head_dim] of gathered slots [tokens, heads, 2 * head_dim].

    Raises `Damaged` where the tokens are no whole number of blocks."""
    tokens, heads, both = slots.shape
    if not tokens or tokens % block or both % 2:
        raise Damaged(
            f"{tokens} tokens of {both} elements a head are no whole blocks of {block} tokens",
            "give the block size of the engine that wrote them",
        )
    dim = both // 2
    blocks = slots.reshape(-1, block, heads, both).swapaxes(1, 2).reshape(-1, heads, block * both)
    k = blocks[..., : block * dim].reshape(-1, heads, dim, block)
    v = blocks[..., block * dim :].reshape(-1, heads, block, dim)
    shape = (tokens, heads, dim)
    return k.transpose(0, 3, 1, 2).reshape(shape), v.swapaxes(1, 2).reshape(shape)


def to_slots(k: Array, v: Array, block: int) -> Array:
    """The reverse; tokens must be whole blocks."""
    tokens, heads, dim = k.shape
    count = tokens // block
    by_head = k.reshape(count, block, heads, dim).transpose(0, 2, 3, 1)
    first = by_head.reshape(count, heads, dim * block)
    second = v.reshape(count, block, heads, dim).swapaxes(1, 2).reshape(count, heads, block * dim)
    blocks = np.concatenate([first, second], axis=-1).reshape(count, heads, block, 2 * dim)
    return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(tokens, heads, 2 * dim)
