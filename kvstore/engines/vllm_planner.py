"""The scheduler's side: what of a request is stored, and which of its blocks are to be saved.

Loads are asynchronous: vLLM schedules a request, and lets others share its pages, once all of them are
loaded. With its other way, what is computed on top of a load that fails has the right name and the wrong
rows: a request that is aborted then leaves such pages in vLLM's own cache, and under asynchronous
scheduling the step that is on its way answers from them.

A block may be saved once the step that computed its last token was executed on all ranks, whichever
request's step that was. So blocks are saved before a later step begins, not at the end of their own.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvsnap.engines.vllm_chain import Chain, cannot_name
from kvsnap.engines.vllm_identity import Identities
from kvsnap.engines.vllm_plan import Done, Family, Move, Plan, Rank
from kvsnap.engines.vllm_remote import Ahead
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.store import Store

IDLE_SECONDS = 0.005
"""A new request may wait as long, where all others wait for the remote."""
BAD_SECONDS = 30.0
"""How long a block is not offered that a worker could not load and that the index still names: in a
store that cannot be written it would be tried for each request."""
_log = logging.getLogger("kvsnap")


@dataclass(eq=False)
class Tracked:
    """A request whose blocks have names; what is counted here is blocks at its front."""

    request: Any
    family: int
    chain: Chain
    saved: int = 0
    """Stored, or on their way."""
    settled: int = 0
    """Known to be in the engine, and right."""
    filling: int = 0
    """Filled when all steps that were planned until now are executed."""
    admitted: int = 0
    """How often vLLM gave it pages, and took them: steps of an earlier time say nothing of these."""
    local: int = 0
    """Tokens that vLLM's own prefix cache had when it asked last."""
    pages: Sequence[int] | None = None
    """vLLM's blocks of a request that has finished, from before they were freed."""


class Planner:
    """For one engine. `size`: tokens of a stored block; `page`: of one of vLLM's."""

    def __init__(
        self,
        store: Store,
        identities: Identities,
        tenant: Tenant | None,
        size: int,
        page: int,
        *,
        trust_media_names: bool = False,
    ) -> None:
        """`trust_media_names`: see `cannot_name`."""
        self.store, self.identities, self.tenant = store, identities, tenant
        self.size, self.page = size, page
        self.trust_media_names = trust_media_names
        self.families: list[Family] = []
        self._roots: list[Mapping[Rank, Root]] = []
        self._tracked: dict[str, Tracked] = {}
        self._finished: list[Tracked] = []
        self._loads: list[Move] = []
        self._steps = deque[tuple[int, list[tuple[Tracked, int, int]]]]()
        """(step, what it fills: request, how often that was admitted, blocks) of steps that are not
        known to be executed."""
        self._ripe = dict[str, Tracked]()
        """Requests of which something may be settled and not saved."""
        self._bad: dict[bytes, float] = {}
        self.stopped = False
        """Whether the weights were replaced: what is computed now has no names."""
        self._loading: dict[str, set[bytes]] = {}
        """Names of the blocks that a request waits for."""
        self._step = 0
        self._ahead = Ahead(store, store.through) if store.through is not None else None
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="kvsnap-notes")
        self._noting: Future[None] | None = None
        self._told: set[str] = set()

    def matched(self, request: Any, computed: int) -> int | None:
        """Tokens that are stored beyond the first `computed`, which vLLM has; None: ask again. At least
        one token is left to compute, because no logits are stored."""
        one = self._track(request)
        if one is None or self.stopped:
            return 0
        most = (request.num_tokens - 1) // self.size
        one.chain.reach(most)
        if self._ahead is not None and not self._ahead.is_here(
            request.request_id, self._roots[one.family], lambda: self._move(one, 0, most, ())
        ):
            return None
        depth = min(self._depth(names[1 : most + 1]) for names in one.chain.names.values())
        one.saved, one.local = depth, computed
        if depth * self.size <= computed:
            return 0
        first = next(iter(one.chain.names.values()))[computed // self.size + 1]
        if any(first in names for names in self._loading.values()):
            return None  # soon its pages are in vLLM's own cache, for all who wait for them
        return depth * self.size - computed

    def admit(self, request: Any, pages: Sequence[int], external: int) -> None:
        """vLLM gives a request these pages and counts `external` tokens as loaded, behind those that
        its own prefix cache has. It does so again, with none, once these are loaded."""
        one = self._tracked.get(request.request_id)
        if one is None or request.num_computed_tokens:
            return
        one.settled, one.filling, one.admitted = 0, 0, one.admitted + 1
        stop = (one.local + external) // self.size
        if external:
            held = one.local // self.page
            load = self._move(one, one.local // self.size, stop, pages, held)
            self._loads.append(load)
            self._loading[request.request_id] = set(next(iter(load.names.values()))[1:])
        self._count(next(iter(one.chain.names.values()))[stop], external, request.num_tokens)

    def plan(self, scheduled: Mapping[str, int], pages_of: Callable[[str], Sequence[int]]) -> Plan:
        """For a step that computes so many tokens of each request."""
        self._step += 1
        filled = list[tuple[Tracked, int, int]]()
        # Of some hundred requests, each step: be quick.
        for request_id, tokens in scheduled.items():
            one = self._tracked.get(request_id)
            if one is None:
                continue
            blocks = (one.request.num_computed_tokens + tokens) // self.size
            if blocks > one.filling:
                one.filling = blocks
                filled.append((one, one.admitted, blocks))
        if filled:
            self._steps.append((self._step, filled))
        saves = self.last_saves()
        ripe, self._ripe = self._ripe, {}
        saves += [move for key, one in ripe.items() for move in self._due(one, pages_of(key))]
        loads, self._loads = self._loads, []
        if not scheduled and self._ahead is not None:
            self._ahead.rest(IDLE_SECONDS)
        # Every step is sent to every rank, and identities have some KB each.
        families = self.families if saves or loads else ()
        return Plan(self._step, not scheduled, families, saves, loads)

    def last_saves(self) -> list[Move]:
        """Of requests that have finished, what is settled by now. They are then forgotten: their pages
        are others' from the next step on."""
        saves = list[Move]()
        for one in self._finished:
            self._ripe.pop(one.request.request_id, None)
            saves += self._due(one, one.pages or ())
            one.admitted += 1
        self._finished.clear()
        return saves

    def settled_saves(self) -> list[Move]:
        """Of requests that have finished, what is settled; they are not forgotten: a step that is not
        known to be executed may have filled more."""
        return [move for one in self._finished for move in self._due(one, one.pages or ())]

    def loaded(self, request_id: str) -> None:
        """All ranks have what a request waited for, or have said what is missing."""
        self._loading.pop(request_id, None)

    def settle(self, done: Done) -> None:
        """A step was executed."""
        while self._steps and self._steps[0][0] <= done.step:
            for one, admitted, blocks in self._steps.popleft()[1]:
                if one.admitted == admitted:
                    one.settled = blocks
                    self._ripe[one.request.request_id] = one
        for one in self._tracked.values() if done.missed else ():
            # vLLM has set back by now whoever waited for it, and it is stored once more.
            one.saved = min(one.saved, one.request.num_computed_tokens // self.size)
        until = time.monotonic() + BAD_SECONDS
        self._bad |= {name: until for name in done.missed if self.store.blocks.offers(name)}
        self.stopped = self.stopped or done.replaced

    def finish(self, request: Any, pages: Sequence[int]) -> None:
        """A request has ended; its pages are free for others once the next step begins."""
        one = self._tracked.pop(request.request_id, None)
        if self._ahead is not None:
            self._ahead.forget(request.request_id)
        if one is not None:
            one.pages = list(pages)
            self._finished.append(one)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._notes.shutdown()

    def _track(self, request: Any) -> Tracked | None:
        one = self._tracked.get(request.request_id)
        if one is None:
            reason = cannot_name(request, trust_media_names=self.trust_media_names)
            try:
                family = self._family(request) if not reason else 0
            except (KvsnapError, OSError) as error:
                reason = str(error)
            if reason:
                self._tell(reason)
                return None
            chain = Chain(request, self._roots[family], self.size)
            one = self._tracked[request.request_id] = Tracked(request, family, chain)
        return one

    def _family(self, request: Any) -> int:
        lora = request.lora_request
        family = self.identities.plain() if lora is None else self.identities.with_lora(lora)
        if family not in self.families:
            roots = {rank: root_of(identity, self.tenant) for rank, identity in family.items()}
            self.families.append(family)
            self._roots.append(roots)
        return self.families.index(family)

    def _due(self, one: Tracked, pages: Sequence[int]) -> list[Move]:
        """What is settled and not saved."""
        blocks = min(one.settled, one.request.num_tokens // self.size)
        if self.stopped or blocks <= one.saved or len(pages) * self.page < blocks * self.size:
            return []  # the last: preempted
        one.chain.reach(blocks)
        move = self._move(one, one.saved, blocks, pages)
        one.saved = blocks
        return [move]

    def _move(
        self, one: Tracked, first: int, stop: int, pages: Sequence[int], held: int = 0
    ) -> Move:
        in_block = self.size // self.page
        chain = one.chain
        return Move(
            request_id=one.request.request_id,
            family=one.family,
            start=first * self.size,
            token_ids=chain.token_ids(first, stop),
            extras=chain.extras[first:stop],
            names={rank: names[first : stop + 1] for rank, names in chain.names.items()},
            pages=pages[first * in_block : stop * in_block],
            held=max(0, held - first * in_block),
            chain=self._whole(chain, stop),
        )

    def _whole(self, chain: Chain, stop: int) -> Mapping[Rank, Sequence[bytes]]:
        if self.store.behind is None:
            return {}
        return {rank: names[1 : stop + 1] for rank, names in chain.names.items()}

    def _depth(self, names: Sequence[bytes]) -> int:
        most = len(names)
        if self._bad:
            now = time.monotonic()
            self._bad = {name: until for name, until in self._bad.items() if until > now}
            most = next((n for n, name in enumerate(names) if name in self._bad), most)
        try:
            return gallop(lambda number: self.store.blocks.offers(names[number]), most)
        except KvsnapError as error:
            self._tell(f"the store cannot be asked: {error}")
            return 0

    def _count(self, deepest: bytes, reused: int, tokens: int) -> None:
        """Once a request: its deepest block is used, and with it all before it."""
        try:
            self.store.index.count_request(deepest if reused else None, reused, tokens - reused)
            if self._noting is None or self._noting.done():  # a write may wait for other processes
                self._noting = self._notes.submit(self.store.index.write_notes, wait=False)
        except KvsnapError as error:
            self._tell(f"the store's use cannot be noted: {error}")

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            _log.warning("kvsnap: a request is computed without the store: %s", reason)
