"""What a codec does to a model's next-token distributions, and how many bytes its files take.

The method: a text's first `context` tokens are stored as block files and read back; the next tokens
are teacher-forced on the restored rows; their distributions are compared with those on the rows as
they were. KL is KL(exact ‖ restored) in nats, mean over tokens; top-1 is how often both prefer the
same token. Bytes are whole files, headers included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvsnap.formats.block import pack_block, parse_block
from kvsnap.formats.codecs import Codec
from kvsnap.formats.identity import Identity, root_of
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore.match import chain


class Model(Protocol):
    """What is asked of an engine: rows of a text, and distributions on top of rows."""

    layout: Layout

    def rows(self, token_ids: TokenIds) -> Rows: ...

    def log_probs(self, context: TokenIds, rows: Rows, token_ids: TokenIds) -> Any:
        """After each of `token_ids`, which follow `context`, whose rows are `rows`: float32
        [tokens, vocabulary], a torch tensor or a numpy array."""


@dataclass(frozen=True)
class Passage:
    """One text: its context's rows, what follows, and the distributions on the exact rows."""

    name: str
    context: TokenIds
    next: TokenIds
    rows: Rows
    exact: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One codec over all passages. KL in nats, `top1` and `ppl_change` as fractions."""

    ratio: float
    bits_per_value: float
    kl_mean: float
    kl_p99: float
    kl_by_text: dict[str, float]
    top1: float
    ppl_change: float


def passage(model: Model, name: str, token_ids: TokenIds, context: int) -> Passage:
    first, rest = token_ids[:context], token_ids[context:]
    rows = model.rows(first)
    return Passage(name, first, rest, rows, np.asarray(model.log_probs(first, rows, rest)))


def through_files(
    codec: Codec, layout: Layout, ids: TokenIds, rows: Rows, block_size: int
) -> tuple[Rows, int]:
    """Rows of whole blocks packed into files and decoded again, and the files' bytes. Tokens after
    the last whole block stay as they are, as in a session's tail."""
    root = root_of(
        Identity(
            family="bench",
            weights="blake3:" + "0" * 64,
            architecture="bench",
            layout=layout,
            rope=None,
            block_size=block_size,
            fidelity=codec.fidelity,
        )
    )
    restored = {name: array.copy() for name, array in rows.items()}
    total = 0
    for block in chain(chain_names(root.key, ids, block_size), ids, block_size):
        own = slice(block.start, block.start + block_size)
        packed = pack_block(
            block.record(root), codec, layout, {n: a[:, own] for n, a in rows.items()}
        )
        file = parse_block(memoryview(b"".join(packed.buffers)))
        file.decode_into(layout, {n: a[:, own] for n, a in restored.items()})
        total += packed.size
    return restored, total


def measure_loss(model: Model, codec: Codec, passages: Sequence[Passage], block_size: int) -> Loss:
    stored, raw, values = 0, 0, 0
    kls, agreed, likelihood, tokens = [], 0, 0.0, 0
    for text in passages:
        rows, size = through_files(codec, model.layout, text.context, text.rows, block_size)
        whole = len(text.context) // block_size * block_size
        stored += size
        raw += whole * model.layout.token_bytes()
        values += sum(whole * a.shape[0] * a.shape[2] for a in text.rows.values())
        found = np.asarray(model.log_probs(text.context, rows, text.next))
        kls.append(divergence(text.exact, found))
        agreed += int((found.argmax(-1) == text.exact.argmax(-1)).sum())
        actual = (np.arange(len(text.next) - 1), text.next[1:].astype(np.int64))
        likelihood += float((text.exact[actual] - found[actual]).sum())
        tokens += len(text.next)
    every = np.concatenate(kls)
    return Loss(
        ratio=raw / stored,
        bits_per_value=8 * stored / values,
        kl_mean=float(every.mean()),
        kl_p99=float(np.quantile(every, 0.99)),
        kl_by_text={text.name: float(kl.mean()) for text, kl in zip(passages, kls, strict=True)},
        top1=agreed / tokens,
        ppl_change=math.exp(likelihood / (tokens - len(passages))) - 1,
    )


def divergence(exact: np.ndarray, found: np.ndarray) -> np.ndarray:
    """KL(exact ‖ found) of each row of log-probabilities, in nats."""
    share = np.exp(exact.astype(np.float64))
    # A token that was ruled out (-inf) and has no share costs nothing, whatever stands there now.
    with np.errstate(invalid="ignore"):
        total: np.ndarray = np.where(share == 0, 0.0, share * (exact - found)).sum(-1)
    total[total < 0] = 0.0  # rounding of float32 leaves -1e-9 where nothing differs
    return total
