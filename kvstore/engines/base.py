"""What an engine adapter is. A new engine is one file that keeps this contract, plus its suite run.

Positions count from 0; the engine holds one sequence. "Holds" means that KV exists: a token that
was sampled but never evaluated is not held. An adapter refuses by name, before it touches the
engine, what it cannot restore exactly (media, other caches' layouts): better a miss than a guess.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvsnap.formats.identity import EXACT, Identity
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds, common_prefix, token_array
from kvsnap.formats.rowset import Targets, on_host


@dataclass(frozen=True)
class Landing:
    """The one buffer that an engine's load will take, and views of it to fill with rows.

    `rows`: plane → [layers, stop - start, row], writable, not necessarily contiguous. Of groups
    with a span: what belongs to position `stop`, as `Layout.ranges_at` says. Arrays in host memory;
    those of `lossy_landing` may be on a device, see `Targets`.
    """

    start: int
    stop: int
    rows: Targets
    buffer: object


@dataclass(frozen=True)
class LossyRows:
    """Rows that were restored from a lossy codec: positions `start` to the end of `token_ids`.
    Whatever the engine computed on top of them is of their fidelity, too.

    `digest` is that of the rows at `told_by`, at or after `start`. It, not the ids alone, says whether they
    are in the engine: an application may put states of its own into it and take them out.
    """

    fidelity: str
    start: int
    token_ids: TokenIds
    digest: str
    told_by: int


MARKS = 64
"""How many such are remembered of one engine."""


def digest_of(rows: Targets, token: int) -> str:
    """BLAKE3 over one token's rows, plane after plane in the order of their names; the same wherever
    they are."""
    hasher = blake3()
    for name in sorted(rows):
        hasher.update(np.ascontiguousarray(on_host(rows[name][:, token])).data.cast("B"))
    return hasher.hexdigest()


class Engine(ABC):
    """One live context of one engine. Not for use by several threads at once."""

    evaluated = 0
    """Tokens that `evaluate` really computed since the adapter was made."""

    on_gpu = False
    """Whether `load` copies to a GPU: page-locked memory makes that faster."""

    @property
    def shared(self) -> object:
        """What is not for several threads at once: the same object for all adapters of a context."""
        return self

    holder: tuple[str, str | None] | None = None
    """(tenant id, session; None for one without a name) that was resumed into the engine last: only
    that one may be saved, and only its tenant goes on from what the engine holds."""

    marks: tuple[LossyRows, ...] = ()
    """What was restored with loss: such rows must never be stored as exact ones."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Shapes of the rows that `export` gives and `load` takes."""

    @abstractmethod
    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        """Everything besides tokens that decides the rows, read from the live engine.

        `file_digest` gives the digest of a file, remembered where that is safe."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """How many tokens the context can hold."""

    @abstractmethod
    def token_ids(self) -> TokenIds:
        """The ids at positions 0..n-1 that the engine holds KV of; a copy.

        None where the adapter cannot be sure: rows under a wrong name would be used by others."""

    def check_held(self) -> None:
        """Before a save: raises `UsageError` where the engine holds something that `token_ids` gives
        no ids of, so that it would not be stored."""
        return

    @abstractmethod
    def export(self, start: int, stop: int) -> Rows:
        """Rows of positions [start, stop), which must be held, of the groups in blocks. Does not
        disturb the engine.

        The arrays stay valid and unchanged whatever the engine does next.
        """

    def export_state(self) -> Rows:
        """Rows of the groups that have a span, at the position where the engine stands, as
        `Layout.ranges_at` says. Engines whose layout has none are not asked."""
        raise NotImplementedError

    def reach(self, tokens: int) -> int:
        """The last position, at most `tokens`, that `truncate` can go back to. Engines with groups
        that have a span often cannot go back at all: then 0, and all is forgotten."""
        return tokens

    @abstractmethod
    def landing(self, stop: int, start: int = 0) -> Landing:
        """A buffer for the rows of positions [start, stop); the engine is not touched."""

    def lossy_landing(self, stop: int, start: int = 0) -> Landing:
        """As `landing`, for rows that a lossy codec is going to decode: an engine on a device may
        have them there, so that codes are carried over and rows never are."""
        return self.landing(stop, start)

    @abstractmethod
    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        """Make the engine hold `token_ids`: what it holds up to the landing's start, bit for bit,
        then the landing's rows, of which a damaged store may have filled fewer than there are (all
        of them, where the layout needs a state).

        Raises `EngineError` if the engine does not take them; it holds no more than before.
        """

    def held_lossy(self) -> LossyRows | None:
        """The mark of the lossy rows that the engine holds, from the first of them on; or None."""
        held = self.token_ids() if self.marks else token_array([])
        found = [
            mark
            for mark in self.marks
            if common_prefix(held, mark.token_ids) > mark.told_by
            and digest_of(self.export(mark.told_by, mark.told_by + 1), 0) == mark.digest
        ]
        return min(found, key=lambda mark: mark.start, default=None)

    def held_fidelity(self) -> str:
        """Of the rows that the engine holds: `exact` unless lossy ones are among them."""
        lossy = self.held_lossy()
        return lossy.fidelity if lossy is not None else EXACT

    @abstractmethod
    def truncate(self, tokens: int) -> None:
        """Forget positions from `tokens` on, a position that `reach` gave."""

    @abstractmethod
    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        """Compute the next tokens in the engine's own batches; afterwards logits of the last are
        there to sample from. `step_done` is called with the tokens of each batch."""
