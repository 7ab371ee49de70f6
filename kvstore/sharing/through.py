"""Read-through: what of a chain is not here is looked for in a remote while the rest is read.

Blocks come in parallel, are checked as `pull` checks them, stored, and read like any other: the
engine's landing fills from the front meanwhile. A remote that does not answer costs one timeout; it is
then not asked again for a while, and the engine computes. So it does where fetching turns out slower
than computing was measured to be (`kvsnap bench crossover`).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Self

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    NotFound,
    PartlyDone,
    RemoteError,
    StoreError,
)
from kvsnap.formats.identity import Root, layout_of
from kvsnap.formats.layout import Layout
from kvsnap.formats.manifest import block_key
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import events
from kvsnap.kvstore.break_even import MARGIN, NOT_WORTH
from kvsnap.kvstore.foreign import Foreign
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.remotes import Options
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.remembers import Remembers
from kvsnap.kvstore.sharing.fetch import fetch_block
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.transfer import AT_ONCE, at_once_of, in_order
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

OPTIONS = Options(timeout=5.0, tries=1)
"""Somebody waits for a first token: one try, and no longer."""
NOT_FETCHED = "it was not fetched"
MOST_GIVEN_UP = 10_000
SLOW_SECONDS = 30.0
"""How long a block stays unasked for whose like came slower than it is computed."""
Computing = Callable[[int, int], float | None]
"""Seconds to compute positions [start, stop); None where that was not measured."""


class Through:
    """One store's remote."""

    def __init__(self, store: Store, remote: Remote) -> None:
        counted = Counted(remote, events.counts_remote(remote.url))
        self.store, self.remote = store, Remembers(counted)
        self._running: list[threading.Thread] = []
        self._given_up: dict[bytes, tuple[float, str]] = {}
        """Until when, by `time.monotonic`, a block is not asked for, and why."""
        self._problem = ""

    def reach(self, names: Sequence[bytes], depth: int, most: int) -> int:
        """How many of a prompt's first `most` blocks can be had, where `depth` are here."""
        if self._given_up:
            now, never = time.monotonic(), (0.0, "")
            for number in range(depth, most):
                until, reason = self._given_up.get(names[number], never)
                if until > now:
                    most, self._problem = number, reason
                    break

        def there(number: int) -> bool:
            return self.remote.size(block_key(names[depth + number])) is not None

        try:
            return depth + gallop(there, most - depth)
        except RemoteError as error:
            self._problem = error.what
            return depth

    def take_problem(self) -> str:
        """Why the remote could not be asked, once; empty where it could."""
        problem, self._problem = self._problem, ""
        return problem

    def fetch(self, root: Root, wanted: Sequence[Wanted], computing: Computing) -> Fetching:
        """Begin to bring blocks here; see `Fetching`."""
        fetching = Fetching(self, root, wanted, computing)
        self._running = [thread for thread in self._running if thread.is_alive()]
        self._running.append(fetching.thread)
        fetching.thread.start()
        return fetching

    def bring_session(self, name: str, tenant: Tenant | None) -> None:
        """Pull a session that is not here. Raises `NotFound` where the remote does not have it
        either, or does not answer, and `Damaged` where what it has cannot be used."""
        try:
            with suppress(PartlyDone):  # what is missing is computed, and the session is here
                pull(self.store, self.remote, name, tenant=tenant)
        except RemoteError as error:
            raise NotFound(
                f"no session {name!r} in the store, and {error.what}", error.hint
            ) from error
        except (NotFound, StoreError):
            raise
        except KvsnapError as error:
            raise Damaged(
                f"session {name!r} of {self.remote.url} cannot be used: {error.what}", error.hint
            ) from error

    def give_up(self, name: bytes, reason: str, seconds: float = SLOW_SECONDS) -> None:
        """Not to ask for a block any more; it stays with an earlier reason that holds for longer."""
        if len(self._given_up) >= MOST_GIVEN_UP:
            self._given_up.clear()  # they are asked for once more
        known, until = self._given_up.get(name), time.monotonic() + seconds
        if known is None or known[0] < until:
            self._given_up[name] = until, reason

    def close(self) -> None:
        """Blocks that are on their way are waited for, no longer than one operation takes."""
        for thread in self._running:
            thread.join(OPTIONS.timeout)
        self.remote.close()


class Fetching:
    """Blocks on their way. `wait` returns when one is here, or why it will not be."""

    def __init__(
        self, through: Through, root: Root, wanted: Sequence[Wanted], computing: Computing
    ) -> None:
        self._through, self._root, self._wanted = through, root, wanted
        self._computing = computing
        self._layout: Layout = layout_of(root.identity)
        self._ready = {block.name: threading.Event() for block in wanted}
        self._lost: dict[bytes, str] = {}
        self.slow = ""
        """Why the rest had better be computed, where it had."""
        self._stop = False
        self.thread = threading.Thread(target=self._run, name="kvsnap read-through", daemon=True)
        self._started = time.monotonic()
        self._begun = computing(wanted[0].start, wanted[-1].stop)
        """Seconds to compute it all, None where that was not measured."""

    def wait(self, name: bytes) -> str | None:
        """None: it is stored, or was never to come. Else the reason."""
        ready = self._ready.get(name)
        if ready is None or ready.is_set():
            return self._lost.get(name)
        if not self.slow and not ready.wait(self._patience()):
            self._compute_instead(
                f"{NOT_WORTH}: {self._through.remote.url} takes longer than computing"
            )
        return self.slow or self._lost.get(name)

    def is_lost(self, name: bytes) -> bool:
        """Whether the block did not come; `Through.reach` tells why, and that for a while."""
        return name in self._lost or bool(self.slow)

    def _patience(self) -> float | None:
        """Seconds until what was waited is more than computing takes."""
        if self._begun is None:
            return None
        return max(0.0, self._started + MARGIN * self._begun - time.monotonic())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop = True  # what is under way still comes, and is found by the next resume

    def _run(self) -> None:
        reason = NOT_FETCHED
        try:
            reason = self._bring() or reason
        except KvsnapError as error:
            reason = error.what
        finally:
            for block in self._late():
                if not self._stop:  # or the same would be asked for again at once
                    self._through.give_up(block.name, reason)
                self._lost[block.name] = reason
                self._ready[block.name].set()

    def _bring(self) -> str | None:
        """Why it ended before the last block, if it did."""
        store = self._through.store
        store.check_tenant(self._root.tenant_id)
        with store.holds.lease() as lease, closing(self._arriving()) as arriving:
            for number, (block, data) in enumerate(arriving):
                if self._stop:
                    return None
                if isinstance(data, KvsnapError):
                    self._give_up(block, data)
                    return data.what
                try:
                    store.blocks.adopt(self._root, block, data, lease)
                except KvsnapError as error:  # a full store, or one that cannot be written
                    self._give_up(block, error)
                    raise
                self._ready[block.name].set()
                if reason := self._not_worth_it(number + 1):
                    self._compute_instead(reason)
                    return reason
        return None

    def _arriving(self) -> Generator[tuple[Wanted, Foreign | KvsnapError]]:
        at_once = at_once_of(self._layout.in_blocks.size(len(self._wanted[0].token_ids)))
        return in_order(self._get, self._wanted, at_once, linger=0)

    def _get(self, block: Wanted) -> Foreign | KvsnapError:
        if self._stop:
            return KvsnapError(NOT_FETCHED)
        try:
            # An encrypted store's remote is sealed: anyone can have put a plain block there.
            opener, sealed = self._through.store.opener, self._through.store.encrypt
            remote, root = self._through.remote, self._root
            return fetch_block(remote, opener, root, block, self._layout, sealed=sealed)
        except KvsnapError as error:
            return error

    def _give_up(self, block: Wanted, error: KvsnapError) -> None:
        """Whatever the remote says of it next, this resume goes on without. What is damaged there
        comes no better the next time."""
        seconds = math.inf if isinstance(error, Damaged) else SLOW_SECONDS
        self._through.give_up(block.name, f"block {block.name.hex()[:12]}: {error.what}", seconds)

    def _compute_instead(self, reason: str) -> None:
        for block in self._late():
            self._through.give_up(block.name, reason)
        self.slow, self._stop = reason, True

    def _late(self) -> list[Wanted]:
        return [block for block in self._wanted if not self._ready[block.name].is_set()]

    def _not_worth_it(self, done: int) -> str:
        """Why the rest had better be computed; empty where not. Those under way are taken for all but
        here: judged by the first alone, a remote far away would be slow that is only far away."""
        count = len(self._wanted)
        left, begun = count - done, min(count, done + AT_ONCE)
        if not left:
            return ""
        computing = self._computing(self._wanted[done].start, self._wanted[-1].stop)
        fetching = (time.monotonic() - self._started) * (count - begun) / begun
        if computing is None or fetching <= MARGIN * computing:
            return ""
        return (
            f"{NOT_WORTH}: fetching {left} more blocks takes about {fetching:.1f} s, computing them"
            f" {computing:.1f} s"
        )
