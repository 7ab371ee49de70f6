"""After a request: learn from its response, and store what is new in its slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.proxy.answer import Outcome
from kvsnap.kvstore.proxy.identity import saved_slot
from kvsnap.kvstore.proxy.link import Live
from kvsnap.kvstore.proxy.restore import Draft
from kvsnap.kvstore.proxy.save import Ended, new_blocks, store_blocks, sure_tokens
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.slots import Known
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.truth import NOT_HONOURED
from kvsnap.kvstore.proxy.upstream import SlotNow, Upstream, UpstreamError
from kvsnap.kvstore.store import Store

AT_ONCE = 2
"""Slot files in memory, of those that are restored and of those that were saved: a long conversation
of a large model is a gigabyte."""
_PAUSE = 0.2
_PATIENCE = 50
"""Looks, 0.2 s apart, at a slot whose client is gone."""


@dataclass(frozen=True)
class Chosen:
    """Where a request goes. `restored` tokens were restored into the slot, or it holds `held` of them."""

    slot: int
    restored: int
    held: int

    @property
    def reused(self) -> int:
        return self.restored or self.held


class Endings:
    """Of one proxy's requests."""

    def __init__(
        self, upstream: Upstream, store: Store, files: SlotFiles, codec: Codec, told: Told
    ) -> None:
        self._upstream, self._store, self._files = upstream, store, files
        self._codec, self._told = codec, told
        self._storing = asyncio.Semaphore(AT_ONCE)

    async def end(
        self,
        live: Live,
        chosen: Chosen,
        ids: TokenIds,
        found: Draft | None,
        outcome: Outcome,
        auth: Mapping[str, str],
        let_go: Callable[[], Awaitable[None]],
    ) -> None:
        """Learn from the response, and store what is new in the slot. `let_go` is called once nothing
        more is needed of the slot."""
        if outcome.status != 200 and outcome.complete:
            live.slots.note(chosen.slot, None)
            return
        cached, generated = outcome.count("cache_n"), outcome.count("predicted_n")
        live.rates.saw_prompt(outcome.timings)
        if chosen.restored and cached is not None and live.truth.saw(chosen.restored, cached):
            self._told.once("truth", NOT_HONOURED)
        if not _is_ours(chosen, cached):
            live.slots.note(chosen.slot, None)
            return
        if not outcome.complete:
            await self._until_idle(chosen.slot, auth)
        ended = Ended(ids, cached, generated)
        stored = found.stored if found is not None else 0
        if new_blocks(ended, stored, self._store.block_size):
            async with self._storing:
                await self._save(live, chosen.slot, ended, auth, let_go)
        else:
            async with live.slots.saving(chosen.slot):
                now = await self._slot(chosen.slot, auth)
            whole = len(ids) + max((generated or 1) - 1, 0)
            known = Known(ids, now.tokens, now.task)
            live.slots.note(chosen.slot, known if now.tokens == whole else None)
        deepest = found.deepest if found is not None and chosen.restored else None
        computed = outcome.count("prompt_n")
        if cached is not None and computed is not None:
            await asyncio.to_thread(self._store.index.count_request, deepest, cached, computed)

    async def _save(
        self,
        live: Live,
        number: int,
        ended: Ended,
        auth: Mapping[str, str],
        let_go: Callable[[], Awaitable[None]],
    ) -> None:
        """Store what is new in a slot."""
        async with live.slots.saving(number):
            slot = await saved_slot(self._upstream, self._files, number, auth)
            now = await self._slot(number, auth)
        sure = sure_tokens(ended, slot)
        is_all = sure == len(slot.token_ids) == now.tokens
        known = Known(slot.token_ids[:sure].copy(), now.tokens, now.task)
        live.slots.note(number, known if is_all else None)
        await let_go()
        if sure >= self._store.block_size:
            attached = live.attached
            await asyncio.to_thread(store_blocks, self._store, attached, self._codec, slot, sure)

    async def _until_idle(self, number: int, auth: Mapping[str, str]) -> None:
        """The server notices within a second that a client is gone, and lets the slot go."""
        for _ in range(_PATIENCE):
            if not (await self._slot(number, auth)).busy:
                return
            await asyncio.sleep(_PAUSE)

    async def _slot(self, number: int, auth: Mapping[str, str]) -> SlotNow:
        for one in await self._upstream.slots(auth):
            if one.number == number:
                return one
        raise UpstreamError(f"the server has no slot {number} any more")


def _is_ours(chosen: Chosen, cached: int | None) -> bool:
    """Whether all that the server reused was restored here, or left in the slot by an earlier turn:
    else its rows may come from anywhere."""
    if cached is None:
        return True
    if chosen.restored:
        return cached <= chosen.restored
    return chosen.held > 0 or cached == 0
