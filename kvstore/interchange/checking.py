"""Whether a file's rows are those of its token ids, under the model at hand.

The engine computes the first block, and the last one on top of all rows that the file has before it. That
shows another model, other options, another order or place of the elements. It does not show rows in
between that were computed on top of tokens which are gone: llama-server's context shift and its
--cache-reuse move such rows to where the ids ask for them, and what was computed later fits to them. So
blocks in between are computed, too, each on top of the file's rows before it.

Of ids in between all that does not show enough: a prompt with one date changed has as many tokens. So every
id is looked at: in the first layer V depends on the token alone. The engine computes each id that occurs
once, and compares that row wherever it occurs. A model whose first layer is not like that is computed whole.
"""

from __future__ import annotations

import numpy as np

from kvsnap.engines.base import Engine
from kvsnap.formats.codecs.unverified import Unverified
from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import EXACT
from kvsnap.formats.layout import Array, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.fidelity import forget_doubts, mark_lossy
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.interchange.rounding import Rounding

HINT = (
    "give the model, the engine options (RoPE, adapter) and the tokens that it was made with;"
    " --unverified keeps it for this session alone"
)
BETWEEN = 7
"""How many blocks between the ends are computed, of longer files evenly spread ones: a stretch of wrong rows
that is longer than a sixth of the file has one in it."""
_KNOWN_TWICE = 16
"""Ids of the first block that are computed at another place, to see whether V depends on it."""


class Check:
    """Of one file's rows, in an engine whose context is overwritten."""

    def __init__(
        self, engine: Engine, target: Target, rows: Rows, ids: TokenIds, block_size: int
    ) -> None:
        self.engine, self.rows, self.ids, self.block_size = engine, rows, ids, block_size
        self.rounding = Rounding(engine, target.types, target.rotation)
        self.difference = 0.0
        """The largest one that was found, and taken."""
        self._first_v = f"{target.layout.groups[0].name}.v"

    def run(self, *, whole: bool = False) -> int:
        """How many tokens were computed. Raises `Damaged` where rows differ by more than rounding.
        `whole`: compute and compare all of them, as slow as a prefill."""
        before = self.engine.evaluated
        self._check_finite()
        if whole:
            self._compare(0, len(self.ids))
            return self.engine.evaluated - before
        own = self._compare(0, min(self.block_size, len(self.ids)))
        last = max(0, len(self.ids) - self.block_size)
        if last:
            self._compare(last, len(self.ids))
            self._compare_between(last)
        if last > self.block_size and not self._check_ids(own):
            self._compare(0, len(self.ids))
        return self.engine.evaluated - before

    def put(self, tokens: int, fidelity: str) -> None:
        """Make the engine hold the first `tokens` rows of the file, as of this fidelity."""
        self.engine.truncate(0)
        landing = self.engine.landing(tokens)
        for name, array in landing.rows.items():
            array[...] = self.rows[name][:, :tokens]
        if fidelity == EXACT:
            forget_doubts(self.engine, self.rows, self.ids)
        mark_lossy(self.engine, fidelity, landing, self.ids[:tokens])
        self.engine.load(landing, self.ids[:tokens])

    def _compare(self, start: int, stop: int) -> Rows:
        """Positions [start, stop), computed on top of the file's own rows; what the engine has there."""
        if start:  # marked: an interrupted check leaves rows there that nobody knows
            self.put(start, Unverified().fidelity)
        else:
            self.engine.truncate(0)
        own = self.rounding.computed(self.ids[:stop], start)
        self._judge(own, start, stop)
        return own

    def _compare_between(self, stop: int) -> None:
        """Whole blocks after the first one and before `stop`, up to where the engine has the file's rows.
        From the back, so that it keeps those before each."""
        starts = range(self.block_size, stop, self.block_size)
        chosen = np.linspace(0, len(starts) - 1, min(BETWEEN, len(starts))).astype(int)
        for start in (starts[number] for number in reversed(chosen)):
            end = min(start + self.block_size, len(self.ids))
            self.engine.truncate(start)
            self.engine.evaluate(self.ids[start:end])
            self._judge(self.engine.export(start, end), start, end)

    def _judge(self, own: Rows, start: int, stop: int) -> None:
        """Raise `Damaged` where the file's rows there are others than `own`, the engine's."""
        given = {name: array[:, start:stop] for name, array in self.rows.items()}
        found = self.rounding.difference(given, own, start)
        self.difference = max(self.difference, found.size)
        if not found.size <= self.rounding.bound:
            raise Damaged(
                f"the file's rows are not what this model computes of these tokens: they differ by"
                f" {found}, and rounding explains {self.rounding.bound:.2g}",
                HINT,
            )

    def _check_ids(self, first: Rows) -> bool:
        """False where the first layer's V does not tell. `first`: the engine's rows of the first block."""
        known = self.ids[: self.block_size]
        between = np.unique(self.ids)
        # Behind others and in another order, so that V of a known id shows whether its place matters.
        asked = np.concatenate([between, known[:_KNOWN_TWICE][::-1]]).astype(self.ids.dtype)
        v = self._computed_v(asked)
        again = v[len(between) :][::-1]
        wanted = self._v(first)[: len(again)]
        bound = self._bound_of_first_layer(first)
        if self._apart(again, wanted).max(initial=0.0) > bound:
            return False
        mine = self._v(self.rows)
        of_each = np.searchsorted(between, self.ids)
        apart = self._apart(mine, v[of_each])
        worst = int(apart.argmax())
        if not apart[worst] <= bound:
            raise Damaged(
                f"the file's rows are those of other tokens: at token {worst} they are not what id"
                f" {self.ids[worst]} gives",
                HINT,
            )
        return True

    def _computed_v(self, ids: TokenIds) -> Array:
        """First layer's V of these ids, in pieces that the context holds."""
        found = []
        step = min(self.engine.capacity, 4096)
        for start in range(0, len(ids), step):
            self.engine.truncate(0)
            self.engine.evaluate(ids[start : start + step])
            found.append(self._v(self.engine.export(0, len(ids[start : start + step]))))
        return np.concatenate(found)

    def _bound_of_first_layer(self, first: Rows) -> float:
        """What the file's first block differs by there; other ids differ by 0.5 and more."""
        count = min(self.block_size, len(self.ids))
        seen = self._apart(self._v(self.rows)[:count], self._v(first))
        return min(self.rounding.bound, 4 * float(seen.max(initial=0.0)) + self.rounding.step)

    def _v(self, rows: Rows) -> Array:
        """float32 [tokens, row]."""
        found: Array = self.rounding.values(self._first_v, rows[self._first_v][:1])[0]
        return found

    def _apart(self, one: Array, other: Array) -> Array:
        """[tokens], of each row's own length: those of some tokens are short."""
        lengths = np.maximum(np.linalg.norm(other, axis=1), 1e-20)
        parted: Array = np.linalg.norm(one - other, axis=1) / lengths
        return parted

    def _check_finite(self) -> None:
        for name, array in self.rows.items():
            for layer in range(len(array)):
                if not np.isfinite(self.rounding.values(name, array[layer])).all():
                    raise Damaged(
                        f"layer {layer} of {name} holds values that are no numbers",
                        "the file is damaged: make it again",
                    )
