"""Put the longest stored prefix of a prompt into an engine: look up, judge, read, load."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsnap.engines.base import Engine, Landing
from kvsnap.formats.errors import Damaged, EngineError, StoreError
from kvsnap.formats.identity import EXACT, Root
from kvsnap.formats.names import TokenIds, chain_names, common_prefix
from kvsnap.formats.rowset import put_rows
from kvsnap.formats.session import SessionFile
from kvsnap.kvstore.break_even import NOT_WORTH, key_of
from kvsnap.kvstore.fidelity import mark_lossy
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.match import Match, chain, longest_usable, tail_reach
from kvsnap.kvstore.restore import read_blocks
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss, Wanted

if TYPE_CHECKING:
    from kvsnap.kvstore.sharing.through import Fetching

REMOTE = "remote: "
"""How a line begins that says why the remote could not be asked."""


@dataclass
class Restored:
    """`tokens` are in the engine now. `own` is the session's file, None once its tail failed;
    `skipped` says why restoring more was not worth it, where it was not."""

    own: SessionFile | None
    tokens: int = 0
    damage: list[str] = field(default_factory=list)
    skipped: str = ""
    deepest: bytes | None = None
    """The last block that was read, perhaps only its front; or the state checkpoint."""
    beyond: int = 0
    """Where the stored blocks end, if no state checkpoint lets the model go on from there."""
    root: Root | None = None
    """Under which what was loaded is stored; None where nothing was."""


@dataclass(frozen=True)
class _Offer:
    """What is stored of a prompt under one root: in blocks, and with a session's own tail."""

    root: Root
    match: Match
    tail: int
    here: int | None = None
    """How many of the blocks are in this store, where the others are to come from a remote."""

    @property
    def to_come(self) -> tuple[Wanted, ...]:
        return () if self.here is None else self.match.blocks[self.here :]

    @property
    def tokens(self) -> int:
        return max(self.match.tokens, self.tail)


class ChainReader:
    """Reads for one engine."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self.store, self.engine = store, engine
        if store.blocks.ram is not None and engine.on_gpu:
            store.blocks.ram.pin()

    def restore(
        self,
        roots: Sequence[Root],
        ids: TokenIds,
        limit: int,
        held: int,
        lease: Lease,
        own: SessionFile | None,
    ) -> Restored:
        """Load what is stored beyond the `held` tokens, at most `limit`, under the root that has
        most of it; of equals the first. Whatever turns out damaged makes it shorter: the search
        runs again without it."""
        result = Restored(own, held)
        while True:
            offer = max(
                (self._look_up(root, ids, limit, result) for root in roots),
                key=lambda offer: offer.tokens,  # the first of equals, as max does
            )
            result.beyond = offer.match.beyond
            if offer.tokens <= held or not self._is_worth_it(offer, held, len(ids), result):
                return result
            match = offer.match
            deepest = match.state or (match.blocks[-1] if match.blocks else None)
            if deepest is not None:
                lease.keep(deepest.name, wait=False)
            landing, filled, missed = self._fill(offer, held, result)
            if missed is not None:
                if missed:
                    result.damage.append(missed)
                del landing  # its memory, perhaps a device's, is needed for the next one
                continue
            if self.store.blocks.ram is not None:
                rows = self.engine.layout.of_blocks(landing.rows)
                self.store.blocks.ram.keep_chain(offer.root, match.blocks, rows, held)
            mark_lossy(self.engine, offer.root.fidelity, landing, ids[:filled])
            try:
                self.engine.load(landing, ids[:filled])
                result.tokens, result.root = filled, offer.root
                result.deepest = deepest.name if deepest is not None else None
            except EngineError as error:
                result.damage.append(error.what)
                result.tokens = common_prefix(self.engine.token_ids(), ids)
            return result

    def _look_up(self, root: Root, ids: TokenIds, limit: int, result: Restored) -> _Offer:
        """The longest stored prefix over blocks, and how far the session's own tail brings it."""
        size = self.store.block_size
        names = chain_names(root.key, ids, size)
        try:
            match = longest_usable(
                self.engine.layout, self.store.blocks, root, names, ids, size, limit
            )
        except StoreError as error:
            result.damage.append(error.what)
            return _Offer(root, Match(0, ()), 0)
        match, here = self._with_remote(root, names, ids, limit, match, result)
        record = result.own.record if result.own else None
        return _Offer(root, match, tail_reach(record, root, match, ids, limit, size), here)

    def _with_remote(
        self,
        root: Root,
        names: list[bytes],
        ids: TokenIds,
        limit: int,
        match: Match,
        result: Restored,
    ) -> tuple[Match, int | None]:
        """The match with what the remote has beyond it, and how many of its blocks are here. Models
        that go on from state checkpoints only do not read through: a session's are pulled."""
        through, size = self.store.through, self.store.block_size
        depth = match.tokens // size
        if through is None or self.engine.layout.needs_state or result.tokens // size > depth:
            return match, None
        whole = through.reach(names, depth, min(limit // size, len(names)))
        problem = through.take_problem()
        if problem.startswith(NOT_WORTH):
            result.skipped = problem
        elif problem:
            result.damage.append(f"{REMOTE}{problem}")
        if whole <= depth:
            return match, None
        return Match(whole * size, tuple(chain(names, ids, size, whole))), depth

    def _is_worth_it(self, offer: _Offer, held: int, prompt_tokens: int, result: Restored) -> bool:
        """Whether restoring is not clearly slower than computing, where that was measured here."""
        ram = self.store.blocks.ram
        needed = [b for b in offer.match.blocks if b.start + len(b.token_ids) > held]
        from_memory = ram is not None and needed and all(block.name in ram for block in needed)
        verdict = self.store.break_even.worth(
            key_of(offer.root.identity),
            held,
            offer.tokens,
            prompt_tokens,
            "memory" if from_memory else "disk",
        )
        result.skipped = verdict.reason or result.skipped
        return verdict.worth

    def _fill(self, offer: _Offer, held: int, result: Restored) -> tuple[Landing, int, str | None]:
        """A landing with the rows that the engine lacks; (landing, tokens, what was missed), that
        empty for a block that did not come from the remote: the next look-up tells why."""
        match, tail, total = offer.match, offer.tail, offer.tokens
        landing = self._landing(offer.root, total, held)
        own = result.own if tail else None
        stop = match.tokens if own is None else own.record.tail_start
        if match.state is not None:
            stop = match.state.start
        if stop > held:
            with self._fetching(offer) as coming:
                done, miss = read_blocks(
                    self.store.blocks,
                    offer.root,
                    match.blocks,
                    self.engine.layout.in_blocks,
                    self.engine.layout.of_blocks(landing.rows),
                    held,
                    stop,
                    coming.wait if coming is not None else None,
                )
            if miss is not None:
                lost = coming is not None and coming.is_lost(miss.name)
                return landing, done, "" if lost else str(miss)
        if match.state is not None:
            return self._fill_state(offer.root, match.state, landing, held)
        if own is not None:
            try:
                rows_of_tail = self.store.sessions.tail_rows(own)
            except Damaged as error:
                result.own = None
                return landing, stop, f"tail of session {own.record.name!r}: {error.what}"
            if rows_of_tail.keys() != landing.rows.keys():  # a row that nobody filled is none
                result.own = None
                return landing, stop, f"tail of session {own.record.name!r}: it has no rows"
            start = max(stop, held)
            planes = self.engine.layout.planes()
            for name, rows in rows_of_tail.items():
                own_rows = rows[:, start - stop : tail - stop]
                put_rows(planes[name][1], own_rows, landing.rows[name][:, start - held :])
        return landing, total, None

    def _fetching(self, offer: _Offer) -> AbstractContextManager[Fetching | None]:
        """The blocks of an offer on their way from the remote, where some have to come."""
        through = self.store.through
        if through is None or not offer.to_come:
            return nullcontext()
        record = self.store.break_even.here(key_of(offer.root.identity))

        def computing(start: int, stop: int) -> float | None:
            return None if record is None else record.computing(start, stop, stop + 1)

        return through.fetch(offer.root, offer.to_come, computing)

    def _landing(self, root: Root, stop: int, start: int) -> Landing:
        """On the device where that saves host memory and copies: codes are smaller than rows. Not
        with a tier in memory, which keeps decoded rows so that nothing is decoded twice."""
        if root.fidelity == EXACT or self.store.blocks.ram is not None:
            return self.engine.landing(stop, start)
        return self.engine.lossy_landing(stop, start)

    def _fill_state(
        self, root: Root, state: Wanted, landing: Landing, held: int
    ) -> tuple[Landing, int, str | None]:
        """The rows of a state checkpoint; nothing can be used where they are missed."""
        layout = self.engine.layout
        try:
            rows = self.store.blocks.read_state(root, state, layout)
        except Miss as miss:
            return landing, held, str(miss)
        tail = layout.in_blocks.planes()
        for name, (_, plane) in layout.planes().items():
            if name not in tail:
                put_rows(plane, rows[name], landing.rows[name])
            elif state.stop > max(held, state.start):
                own = rows[name][:, max(held - state.start, 0) :]
                put_rows(plane, own, landing.rows[name][:, max(state.start, held) - held :])
        return landing, state.stop, None
