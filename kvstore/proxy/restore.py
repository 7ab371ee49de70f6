"""The longest stored prefix of a prompt as a slot file, where that beats computing it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvsnap.formats.layout import Array
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.chain_reader import ChainReader, Restored
from kvsnap.kvstore.proxy.identity import Attached
from kvsnap.kvstore.proxy.measure import Rates
from kvsnap.kvstore.proxy.rows import SlotLanding
from kvsnap.kvstore.store import Store


@dataclass(frozen=True, eq=False)
class Draft:
    """A slot file of the first `tokens` tokens of a prompt, in memory; `buffer` is None where nothing
    is worth restoring. `stored`: how many tokens the store has, restored or not."""

    buffer: Array | None
    tokens: int
    stored: int
    deepest: bytes | None
    problems: tuple[str, ...]
    seconds: float


class _Reader(ChainReader):
    """Its measure of what is worth restoring is that of the server, not of an engine in this
    process."""

    def __init__(self, store: Store, engine: SlotLanding, rates: Rates, held: int) -> None:
        super().__init__(store, engine)
        self._rates, self._held = rates, held
        self.stored = 0

    def _is_worth_it(self, offer: object, held: int, prompt_tokens: int, result: Restored) -> bool:
        tokens: int = getattr(offer, "tokens", 0)
        self.stored = tokens
        return self._rates.is_worth(self._held, tokens)


def draft(store: Store, attached: Attached, rates: Rates, ids: TokenIds, held: int) -> Draft:
    """In a thread. `held`: how many of the prompt's first tokens a slot holds already. The last token
    is left to compute: a slot has no logits to sample from. Damage makes it shorter."""
    started = time.perf_counter()
    engine = SlotLanding(attached.layout, attached.kinds, ids)
    reader = _Reader(store, engine, rates, held)
    limit = min(len(ids) - 1, attached.n_ctx - 1)
    with store.holds.lease() as lease:
        found = reader.restore([attached.root], ids, limit, 0, lease, None)
    buffer = engine.draft.buffer if engine.draft is not None and found.tokens else None
    return Draft(
        buffer=buffer,
        tokens=engine.tokens if buffer is not None else 0,
        stored=reader.stored,
        deepest=found.deepest,
        problems=tuple(found.damage),
        seconds=time.perf_counter() - started,
    )
