"""One request, from its prompt to the blocks that its slot leaves.

    prompt → token ids → what is stored, what slots hold → slot file → restore → forward → save

Whatever goes wrong on the way to the forwarding ends in forwarding the request as it came.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.chain_reader import REMOTE
from kvsnap.kvstore.proxy.answer import Outcome
from kvsnap.kvstore.proxy.choosing import Choosing, Chosen, StartedAnewError
from kvsnap.kvstore.proxy.ending import AT_ONCE, Endings
from kvsnap.kvstore.proxy.link import Link, Live
from kvsnap.kvstore.proxy.prompt import Request, token_ids
from kvsnap.kvstore.proxy.restore import Draft, draft
from kvsnap.kvstore.proxy.slot_files import SlotFiles
from kvsnap.kvstore.proxy.slots import Claim
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.upstream import SlotNow, Upstream, UpstreamError
from kvsnap.kvstore.store import Store

Deliver = Callable[
    [bytes, Callable[[], None], Callable[[Mapping[str, Any]], Mapping[str, str]]],
    Awaitable[Outcome],
]
"""Forward a body; call the first when the response begins, and add the headers that the second gives."""
_LOOK = 0.02
"""Seconds between two looks at whether a request was started."""


class Turns:
    """Serves requests through one upstream."""

    def __init__(
        self,
        upstream: Upstream,
        link: Link,
        store: Store,
        files: SlotFiles,
        codec: Codec,
        told: Told,
    ) -> None:
        self._upstream, self._link, self._store = upstream, link, store
        self._told = told
        self._choosing = Choosing(upstream, files, told)
        self._ending = Endings(upstream, store, files, codec, told)
        self._drafting = asyncio.Semaphore(AT_ONCE)
        self._endings: set[asyncio.Task[None]] = set()
        self._serving = 0

    async def serve(self, request: Request, auth: Mapping[str, str], deliver: Deliver) -> bool:
        """True where the request was forwarded and answered here; False where it is to be forwarded
        as it came. Raises what `deliver` raises."""
        self._serving += 1
        try:
            try:
                return await self._serve(request, auth, deliver)
            except StartedAnewError:
                self._link.forget()
                return await self._serve(request, auth, deliver)
        except StartedAnewError:
            return False
        finally:
            self._serving -= 1

    @property
    def at_work(self) -> int:
        """Requests that are answered, and those that ended and are not stored yet."""
        return self._serving + len(self._endings)

    async def _serve(self, request: Request, auth: Mapping[str, str], deliver: Deliver) -> bool:
        live, ids, now = await self._look_up(request, auth)
        if live is None or ids is None or not 2 <= len(ids) < live.attached.n_ctx:
            return False
        claim = await live.slots.claim()
        ending: Callable[[Outcome], Awaitable[None]] | None = None
        outcome = Outcome()
        try:
            if await live.slots.settled(ids):
                now = await self._look()
            found = await self._draft(live, ids, now)
            async with live.slots.launch():
                try:
                    chosen = await self._choosing.choose(live, claim, ids, found, auth)
                except UpstreamError as error:
                    self._told.once("slots", error)
                    return False
                await live.slots.start(self._look, chosen.slot)

                async def end(outcome: Outcome) -> None:
                    try:
                        await self._ending.end(live, chosen, ids, found, outcome, auth, let_go)
                    finally:
                        await let_go()

                async def let_go() -> None:
                    if claim.release():
                        live.slots.has_ended(chosen.slot)

                ending = end
                live.slots.asks(chosen.slot, ids)
                body = request.pinned(chosen.slot, cache_prompt=chosen.reused > 0)
                started = asyncio.Event()
                more = self._headers(live, chosen)
                running = asyncio.ensure_future(deliver(body, started.set, more))
                try:
                    await self._until_started(live, chosen, running, started)
                except BaseException:
                    running.cancel()
                    with contextlib.suppress(BaseException):
                        await running
                    raise
            try:
                outcome = await running
            except asyncio.CancelledError:
                running.cancel()
                with contextlib.suppress(BaseException):
                    await running
                raise
            return True
        finally:
            if ending is not None:
                live.slots.ending(chosen.slot)
            self._finish(claim, ending, outcome)

    async def close(self) -> None:
        """Wait until the slots of requests that ended are stored."""
        while self._endings:
            await asyncio.wait(set(self._endings))

    async def _look_up(
        self, request: Request, auth: Mapping[str, str]
    ) -> tuple[Live | None, TokenIds | None, list[SlotNow]]:
        """The process, the prompt and the slots, asked for at once. None: forward it as it came; what is
        wrong with a request the server says itself."""
        live, ids, now = await asyncio.gather(
            self._link.current(),
            token_ids(self._upstream, request, auth),
            self._upstream.slots(auth),
            return_exceptions=True,
        )
        for problem in (live, ids, now):
            if isinstance(problem, (UpstreamError, KeyError, TypeError)):
                return None, None, []
            if isinstance(problem, BaseException):
                raise problem
        assert live is None or isinstance(live, Live)
        if live is None or live.truth.stopped:
            return None, None, []
        if live.attached.has_adapters and await self._adapted(auth):
            return None, None, []
        return live, ids, now  # type: ignore[return-value]

    async def _adapted(self, auth: Mapping[str, str]) -> bool:
        """Whether LoRA adapters were turned on since the server was looked at."""
        try:
            if not any(await self._upstream.adapters(auth)):
                return False
        except UpstreamError:
            return True
        self._told.once("adapters", "the server applies LoRA adapters: nothing is kept")
        self._link.forget()
        return True

    async def _draft(self, live: Live, ids: TokenIds, now: list[SlotNow]) -> Draft | None:
        """What is stored, as a slot file. None where nothing can be said of the store."""
        try:
            _, held = live.slots.held(now, ids)
            async with self._drafting:
                found = await asyncio.to_thread(
                    draft, self._store, live.attached, live.rates, ids, held
                )
        except (KvsnapError, OSError, MemoryError) as error:
            self._told.once("read", f"nothing is restored: {error}")
            return None
        for problem in found.problems:
            self._told.once("remote" if problem.startswith(REMOTE) else "damage", problem)
        return found

    def _headers(
        self, live: Live, chosen: Chosen
    ) -> Callable[[Mapping[str, Any]], Mapping[str, str]]:
        """Of a stream they are what is expected: it begins before the server has counted."""

        def more(timings: Mapping[str, Any]) -> Mapping[str, str]:
            counted = timings.get("cache_n")
            reused = counted if type(counted) is int else chosen.reused
            saved = live.rates.saved(reused, chosen.restored)
            return {
                "x-kvsnap-reused-tokens": str(reused),
                "x-kvsnap-seconds-saved": f"{saved:.3f}",
                "x-kvsnap-slot": str(chosen.slot),
            }

        return more

    async def _until_started(
        self,
        live: Live,
        chosen: Chosen,
        running: asyncio.Future[Outcome],
        started: asyncio.Event,
    ) -> None:
        """Until the request runs in its slot: from then on others that start do not clear it."""
        if live.slots.count == 1:
            return
        waiting = asyncio.ensure_future(started.wait())
        try:
            while True:
                both: set[asyncio.Future[Any]] = {running, waiting}
                await asyncio.wait(both, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
                if running.done() or waiting.done():
                    return
                with contextlib.suppress(UpstreamError):
                    now = await self._upstream.slots()
                    if any(one.number == chosen.slot and one.busy for one in now):
                        return
        finally:
            waiting.cancel()

    def _finish(
        self,
        claim: Claim,
        ending: Callable[[Outcome], Awaitable[None]] | None,
        outcome: Outcome,
    ) -> None:
        """Let go of the slot, after what it holds is saved."""
        if ending is None:
            claim.release()
            return

        async def finish() -> None:
            try:
                await ending(outcome)
            except UpstreamError as error:
                self._told.once("save" if error.status else "down", error)
            except (KvsnapError, OSError, MemoryError) as error:
                self._told.once("save", f"nothing is stored: {error}")
            finally:
                claim.release()

        task = asyncio.ensure_future(finish())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _look(self) -> list[SlotNow]:
        """The slots, or none of them where the server does not say."""
        try:
            return await self._upstream.slots()
        except UpstreamError:
            return []
