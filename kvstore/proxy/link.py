"""The upstream process that requests go to now, and what is known of it.

/props is asked before each turn (0.6 ms, not behind the server's batches): `media_marker` is another one
in each process, so that a server that was started anew is noticed before a turn relies on a slot.
"""

from __future__ import annotations

import asyncio
import time

from kvsnap.formats.errors import KvsnapError, NotFound, Unsupported
from kvsnap.kvstore.proxy.identity import Attached, Attacher
from kvsnap.kvstore.proxy.measure import Rates
from kvsnap.kvstore.proxy.slots import Slots
from kvsnap.kvstore.proxy.told import Told
from kvsnap.kvstore.proxy.truth import Truth
from kvsnap.kvstore.proxy.upstream import Props, Upstream, UpstreamError

_AGAIN = 60.0
"""Seconds until a process is looked at again where what was wrong may pass."""


class Live:
    """One upstream process."""

    def __init__(self, props: Props, attached: Attached, rates: Rates) -> None:
        self.props, self.attached, self.rates = props, attached, rates
        self.slots, self.truth = Slots(attached.slots, windows=attached.window > 0), Truth()
        self.lost = 0
        """Slots in a row that did not have the rows of their windows any more."""


class Link:
    """Finds the process, and looks at each new one once."""

    def __init__(self, upstream: Upstream, attacher: Attacher, told: Told) -> None:
        self._upstream, self._attacher, self._told = upstream, attacher, told
        self._lock = asyncio.Lock()
        self._live: Live | None = None
        self._refused: tuple[Props | None, float] = (None, 0.0)

    async def current(self) -> Live | None:
        """None where requests are forwarded as they come: the reason was logged."""
        try:
            props = await self._upstream.props()
        except UpstreamError as error:
            self._told.once("down", error)
            return None
        if self._live is not None and self._live.props == props:
            return self._live
        async with self._lock:
            if self._live is not None and self._live.props == props:
                return self._live
            if self._refused[0] == props and time.monotonic() < self._refused[1]:
                return None
            self._live = await self._look(props)
            return self._live

    def forget(self) -> None:
        """The process is to be looked at again before the next turn."""
        self._live = None

    async def _look(self, props: Props) -> Live | None:
        rates = Rates()
        try:
            if not props.process:
                raise Unsupported(
                    "the server does not tell its processes apart (no media_marker in /props)",
                    "use a llama-server of 2026 or later",
                )
            attached = await self._attacher.attach(props, rates)
        except UpstreamError as error:
            passing = error.status in (0, 503)
            self._refused = (props, time.monotonic() + (0 if passing else _AGAIN))
            self._told.once("down" if passing else "refused", error)
            return None
        except KvsnapError as error:
            stays = isinstance(error, (Unsupported, NotFound))
            self._refused = (props, float("inf") if stays else time.monotonic() + _AGAIN)
            self._told.once("refused", error)
            return None
        self._told.over("down")
        return Live(props, attached, rates)
