"""What the slots of an upstream hold, as far as the proxy knows it, and who uses which.

The server's word is taken for what is in a slot now (/slots: the last task, the number of tokens), the
proxy's own for where that came from. A slot whose task or count is another than the proxy left it with
was used by somebody else: its rows may be shifted, or restored from anywhere, and the proxy neither
builds on them nor stores them.

A llama-server with unified KV, the default, clears idle slots whenever a request is started in another
one (`--cache-idle-slots`). So between a restore and the start of its request, and between the end of a
request and the saving of its slot, no other request may be started: `launch` and `saving` see to that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvsnap.formats.names import TokenIds, common_prefix
from kvsnap.kvstore.proxy.upstream import SlotNow

_LOOK = 0.01
_PATIENCE = 200
"""Looks, 10 ms apart, at slots whose requests are ending."""
_SOON, _SETTLED = 0.5, 5.0
"""Seconds that a next turn waits: for the end of the one before, and for its slot to be saved, which is
longer than a gigabyte takes to be written."""


@dataclass(frozen=True, eq=False)
class Known:
    """What a slot held when the proxy left it: `token_ids` or more that begins with them."""

    token_ids: TokenIds
    tokens: int
    task: int

    def still(self, now: SlotNow) -> bool:
        return (self.tokens, self.task) == (now.tokens, now.task)


@dataclass(eq=False)
class _Asked:
    """A request in a slot, until what the slot holds is noted."""

    ids: TokenIds
    noted: asyncio.Event
    ended: bool = False

    def goes_on(self, ids: TokenIds) -> bool:
        """Whether a prompt goes on from this one's; of the same prompt asked twice at once neither
        waits for the other."""
        more = len(ids) > len(self.ids) or self.ended
        return more and common_prefix(self.ids, ids) == len(self.ids)


class Slots:
    """The slots of one upstream process, for one event loop. `windows`: of a model with sliding windows,
    whose slots are not to be cut (`held`)."""

    def __init__(self, count: int, *, windows: bool = False) -> None:
        self.count, self._windows = count, windows
        self._free = asyncio.Semaphore(count)
        self._taken: set[int] = set()
        self._running: set[int] = set()
        self._asked: dict[int, _Asked] = {}
        self._known: dict[int, Known] = {}
        self._order: dict[int, int] = {}
        self._turn = 0
        self._latest = -1
        self._gate = asyncio.Lock()
        self._saves = 0
        # Events, not a condition: they change without waiting, so that a request that is cancelled
        # cannot leave one as it was.
        self._none_saved, self._none_starts = asyncio.Event(), asyncio.Event()
        self._none_saved.set()
        self._none_starts.set()

    async def claim(self) -> Claim:
        """Wait until a slot is free for one more request. The caller releases it."""
        await self._free.acquire()
        return Claim(self)

    def held(self, now: Sequence[SlotNow], ids: TokenIds) -> tuple[int, int]:
        """The idle slot that is known to hold most of a prompt's front, and how much; (-1, 0) for
        none, and where it would cost another conversation most of what it holds."""
        best = (-1, 0)
        for slot in self._idle(now):
            known = self._known.get(slot.number)
            if known is None or not known.still(slot):
                continue
            common = common_prefix(known.token_ids, ids)
            # Of a slot that loses half the server makes a copy in memory, and may put another of its
            # copies in its place, which nobody here knows.
            spoils = common * 2 <= known.tokens + 2
            # Rows that a window masks may have been overwritten where slots share a cache; whoever goes
            # back behind them computes with what is left. llama-server does not look.
            spoils = spoils or (self._windows and common < known.tokens)
            if common > best[1] and not spoils:
                best = (slot.number, common)
        return best

    def spare(self, now: Sequence[SlotNow]) -> int:
        """The slot whose content will be missed least: an empty one, else the one used longest ago."""
        free = [slot for slot in now if slot.number not in self._taken] or list(now)
        return min(
            free, key=lambda s: (s.busy, s.tokens > 0, self._order.get(s.number, 0), s.number)
        ).number

    def longest_unused(self, now: Sequence[SlotNow]) -> int | None:
        """Of idle slots that hold something; None where there are none."""
        held = [slot for slot in self._idle(now) if slot.tokens]
        return min((self._order.get(s.number, 0), s.number) for s in held)[1] if held else None

    def taken(self, slot: int) -> None:
        self._taken.add(slot)
        self._turn += 1
        self._order[slot] = self._turn

    def take_again(self, claim: Claim, number: int, known: Known, now: Sequence[SlotNow]) -> bool:
        """Claim a slot if it is idle, and still as it was left; nobody builds on it then."""
        if self._known.get(number) is not known:
            return False
        if not any(one.number == number and known.still(one) for one in self._idle(now)):
            return False
        claim.take(number)
        return True

    def let_go(self, slot: int) -> None:
        self._taken.discard(slot)
        self._running.discard(slot)
        self._free.release()

    def went_back(self, now: Sequence[SlotNow]) -> bool:
        """Whether the server counts its tasks from the start again: it was started anew."""
        latest = max((slot.task for slot in now), default=-1)
        before, self._latest = self._latest, latest
        return latest < before

    def asks(self, slot: int, ids: TokenIds) -> None:
        """A request with this prompt is sent to the slot."""
        self._asked[slot] = _Asked(ids, asyncio.Event())

    def ending(self, slot: int) -> None:
        """Its response is all here; what the slot holds is looked at and saved now."""
        if slot in self._asked:
            self._asked[slot].ended = True

    def has_ended(self, slot: int) -> None:
        """What the slot holds is noted."""
        if slot in self._asked:
            self._asked.pop(slot).noted.set()

    async def settled(self, ids: TokenIds) -> bool:
        """Wait for the slot of the turn before. A client asks its next question before the slot is
        saved, or even before the end of the stream: a prompt that goes on from another one knows its
        answer, as a rule. Whether there was one."""
        found = [one for one in list(self._asked.values()) if one.goes_on(ids)]
        for one in found:
            for seconds in (_SOON, _SETTLED):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(one.noted.wait(), seconds)
                if one.noted.is_set() or not one.ended:
                    break
        return bool(found)

    def note(self, slot: int, known: Known | None) -> None:
        """What a slot holds now; None: something that is not known."""
        if known is None:
            self._known.pop(slot, None)
        else:
            self._known[slot] = known

    @contextlib.asynccontextmanager
    async def launch(self) -> AsyncIterator[None]:
        """While slots are looked at, one is restored and its request is started. One at a time."""
        async with self._gate:
            try:
                yield
            finally:
                self._none_starts.set()

    async def start(self, look: Callable[[], Awaitable[Sequence[SlotNow]]], slot: int) -> None:
        """Inside `launch`, before the request is sent: wait for slots that are to be saved. So are
        those whose request has ended in the server, and is not known here to have ended."""
        for _ in range(_PATIENCE):
            await self._none_saved.wait()
            if not self._running:
                break
            busy = {one.number for one in await look() if one.busy}
            if self._running <= busy and self._none_saved.is_set():
                break
            await asyncio.sleep(_LOOK)
        self._running.add(slot)
        self._none_starts.clear()

    @contextlib.asynccontextmanager
    async def saving(self, slot: int) -> AsyncIterator[None]:
        """While the slot of a request that ended is saved."""
        self._saves += 1
        self._none_saved.clear()
        self._running.discard(slot)
        try:
            await self._none_starts.wait()
            yield
        finally:
            self._saves -= 1
            if not self._saves:
                self._none_saved.set()

    def _idle(self, now: Sequence[SlotNow]) -> list[SlotNow]:
        return [slot for slot in now if not slot.busy and slot.number not in self._taken]


class Claim:
    """One request's right to a slot; which one is said once it is decided."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._is_held = True
        self.slot = -1

    def take(self, slot: int) -> None:
        self.slot = slot
        self._slots.taken(slot)

    def release(self) -> bool:
        """False where that was done before: the slot may be somebody else's by now."""
        was_held, self._is_held = self._is_held, False
        if was_held:
            self._slots.let_go(self.slot)
        return was_held
