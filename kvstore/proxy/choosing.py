"""Which slot a request goes to, and the restore of what is stored into it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.proxy.link import Live
from kvsnap.kvstore.proxy.restore import Draft
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.slots import Claim
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.upstream import Upstream, UpstreamError

_REFUSED = 400


class StartedAnewError(Exception):
    """The server counts its tasks from the start again, in the middle of a turn: it was started anew, or
    slept and lost its slots."""


@dataclass(frozen=True)
class Chosen:
    """Where a request goes. `restored` tokens were restored into the slot, or it holds `held` of them."""

    slot: int
    restored: int
    held: int

    @property
    def reused(self) -> int:
        return self.restored or self.held


class Choosing:
    """Of one proxy's requests."""

    def __init__(self, upstream: Upstream, files: SlotFiles, told: Told) -> None:
        self._upstream, self._files, self._told = upstream, files, told

    async def choose(
        self,
        live: Live,
        claim: Claim,
        ids: TokenIds,
        found: Draft | None,
        auth: Mapping[str, str],
    ) -> Chosen:
        """Look at the slots, restore into one where that brings more, and claim it."""
        now = await self._upstream.slots(auth)
        if live.slots.went_back(now):
            raise StartedAnewError
        best, held = live.slots.held(now, ids)
        if found is not None and found.buffer is not None and found.tokens > held:
            slot = live.slots.spare(now)
            claim.take(slot)
            live.slots.note(slot, None)
            if await self._restore(live, slot, found, auth):
                return Chosen(slot, found.tokens, 0)
            return Chosen(slot, 0, 0)
        slot = best if best >= 0 else live.slots.spare(now)
        claim.take(slot)
        return Chosen(slot, 0, held)

    async def _restore(self, live: Live, slot: int, found: Draft, auth: Mapping[str, str]) -> bool:
        """Whether the server took the slot file; where it did not, its slot is empty."""
        assert found.buffer is not None
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            with self._files.name() as name:
                await _to_its_end(asyncio.to_thread(self._files.write, name, found.buffer))
                answer = await self._restored(live, slot, name, found.tokens, auth)
        except UpstreamError as error:
            self._told.once("restore", error)
            live.truth.saw(found.tokens, 0)  # one that refuses again and again is asked no more
            return False
        except OSError as error:
            self._told.once("restore", f"no slot file can be written: {error}")
            return False
        live.rates.saw_restore(found.tokens, found.seconds + clock() - begun)
        return bool(answer.get("n_restored", found.tokens) == found.tokens)

    async def _restored(
        self, live: Live, slot: int, name: str, tokens: int, auth: Mapping[str, str]
    ) -> Mapping[str, Any]:
        """Slots that share one cache may leave no room: idle ones are erased then, as the server does
        for a request and not for a restore."""
        while True:
            try:
                return await self._upstream.slot_action(slot, "restore", name, auth)
            except UpstreamError as error:
                if error.status != _REFUSED:
                    raise
                others = [o for o in await self._upstream.slots(auth) if o.number != slot]
                full = sum(one.tokens for one in others) + tokens > live.attached.n_ctx
                victim = live.slots.longest_unused(others)
                if not full or victim is None:
                    raise
                await self._upstream.slot_action(victim, "erase", auth=auth)
                live.slots.note(victim, None)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """A thread is not cancelled with its caller: wait for it, so that it leaves no file behind."""
    running = asyncio.ensure_future(work)
    try:
        await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait({running})
