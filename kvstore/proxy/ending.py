"""After a request: learn from its response, and store what is new in its slot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from kvsnap.formats.codecs import Codec
from kvsnap.formats.interchange.llama_server_slot import SlotFile
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.proxy.answer import Outcome
from kvsnap.kvstore.proxy.choosing import Chosen
from kvsnap.kvstore.proxy.identity import saved_slot
from kvsnap.kvstore.proxy.link import Live
from kvsnap.kvstore.proxy.restore import Draft
from kvsnap.kvstore.proxy.save import Ended, new_blocks, store_blocks, sure_tokens
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.slots import Known
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.truth import NOT_HONOURED
from kvsnap.kvstore.proxy.upstream import SlotNow, Upstream, UpstreamError
from kvsnap.kvstore.proxy.windows import with_rows_from
from kvsnap.kvstore.store import Store

AT_ONCE = 2
"""Slot files in memory, of those that are restored and of those that were saved: a long conversation
of a large model is a gigabyte."""
_QUIET = 1.0
"""Seconds after an answer in which programs ask the next question; people take longer."""
_ACCIDENTS = 2
"""Slots in a row that are cut, or looked at, for nothing; then no more are in this process."""
_PAUSE = 0.2
_PATIENCE = 50
"""Looks, 0.2 s apart, at a slot whose client is gone."""


class Endings:
    """Of one proxy's requests."""

    def __init__(
        self, upstream: Upstream, store: Store, files: SlotFiles, codec: Codec, told: Told
    ) -> None:
        self._upstream, self._store, self._files = upstream, store, files
        self._codec, self._told = codec, told
        self._storing = asyncio.Semaphore(AT_ONCE)
        self._fetching = asyncio.Lock()

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
        ended = Ended(ids, generated)
        stored = found.stored if found is not None else 0
        # What a slot with windows holds has to be known to the last token (`Slots.held`).
        if live.attached.window or new_blocks(ended, stored, self._store.block_size):
            async with self._storing:
                lacking = await self._save(live, chosen.slot, ended, stored, auth, let_go)
        else:
            lacking = None
            async with live.slots.saving(chosen.slot):
                now = await self._slot(chosen.slot, auth)
            whole = len(ids) + max((generated or 1) - 1, 0)
            known = Known(ids, now.tokens, now.task)
            live.slots.note(chosen.slot, known if now.tokens == whole else None)
        deepest = found.deepest if found is not None and chosen.restored else None
        computed = outcome.count("prompt_n")
        if cached is not None and computed is not None:
            await asyncio.to_thread(self._store.index.count_request, deepest, cached, computed)
        if lacking is not None and live.lost < _ACCIDENTS:
            await self._fetch(live, chosen.slot, lacking, stored, auth)

    async def _save(
        self,
        live: Live,
        number: int,
        ended: Ended,
        stored: int,
        auth: Mapping[str, str],
        let_go: Callable[[], Awaitable[None]],
    ) -> Known | None:
        """Store what is new in a slot; the first `stored` tokens are not. What it holds, if rows are
        to be fetched for that."""
        async with live.slots.saving(number):
            slot = await saved_slot(self._upstream, self._files, number, auth)
            now = await self._slot(number, auth)
        sure = sure_tokens(ended, slot)
        is_all = sure == len(slot.token_ids) == now.tokens
        known = Known(slot.token_ids[:sure].copy(), now.tokens, now.task)
        live.slots.note(number, known if is_all else None)
        await let_go()
        stored, filled = (count // self._store.block_size for count in (stored, sure))
        if filled <= stored:
            return None
        if _lacks(slot, stored * self._store.block_size):
            return known if is_all else None
        await asyncio.to_thread(store_blocks, self._store, live.attached, self._codec, slot, sure)
        return None

    async def _fetch(
        self, live: Live, number: int, known: Known, stored: int, auth: Mapping[str, str]
    ) -> None:
        """Store a slot whose file lacks rows of sliding windows: it is cut for them, and holds nothing
        of use afterwards. So that is done when no next turn came for it."""
        await asyncio.sleep(_QUIET)
        async with self._fetching:
            claim = await live.slots.claim()
            try:
                now = await self._upstream.slots(auth)
                if live.slots.take_again(claim, number, known, now):
                    await self._fetch_now(live, number, known.token_ids, stored, auth)
            finally:
                if claim.release() and claim.slot >= 0:
                    live.slots.has_ended(number)

    async def _fetch_now(
        self, live: Live, number: int, ids: TokenIds, stored: int, auth: Mapping[str, str]
    ) -> None:
        live.slots.asks(number, ids)  # a next turn waits for the blocks
        live.slots.ending(number)

        async def cut(ids: TokenIds) -> SlotFile:
            live.slots.note(number, None)
            return await self._cut(live, number, ids, auth)

        async with live.slots.saving(number):
            slot = await saved_slot(self._upstream, self._files, number, auth)
        if not np.array_equal(slot.token_ids, ids):
            return
        live.lost += 1
        start = stored // self._store.block_size * self._store.block_size
        slot = await with_rows_from(slot, start, live.attached.window, cut)
        live.lost = 0
        attached, tokens = live.attached, len(ids)
        await asyncio.to_thread(store_blocks, self._store, attached, self._codec, slot, tokens)

    async def _cut(
        self, live: Live, number: int, ids: TokenIds, auth: Mapping[str, str]
    ) -> SlotFile:
        """Cut a slot to its first tokens, and save it; like any other request."""
        async with live.slots.launch():
            await live.slots.start(lambda: self._upstream.slots(auth), number)
            await self._upstream.evaluate(number, ids.tolist(), go_on=True, auth=auth)
        async with live.slots.saving(number):
            return await saved_slot(self._upstream, self._files, number, auth)

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


def _lacks(slot: SlotFile, start: int) -> bool:
    """Whether rows of windowed layers are missing after the first `start` tokens."""
    return slot.window is not None and int(slot.window.positions[0]) > start


def _is_ours(chosen: Chosen, cached: int | None) -> bool:
    """Whether all that the server reused was restored here, or left in the slot by an earlier turn:
    else its rows may come from anywhere."""
    if cached is None:
        return True
    if chosen.restored:
        return cached <= chosen.restored
    return chosen.held > 0 or cached == 0
