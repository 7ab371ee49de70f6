"""An engine without a GPU whose rows make silent errors loud.

Every element of K and V is a small integer that follows, by BLAKE3, from the whole identity, the
layer, the plane, the head, the place in the head, the position and every token id up to there. A
block of another model, prefix, position, layer or head is a plain inequality. With `window` or
`recurrent` it keeps what such models keep: the last rows only, or one state. Nothing is inferred
from timings or reports: `evaluated` and `positions` count what was really computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvsnap.engines.base import Engine, Landing
from kvsnap.formats.errors import DoesNotFit, EngineError, UsageError
from kvsnap.formats.identity import Adapter, Identity, Rope, Shard
from kvsnap.formats.layout import Array, Group, Layout, Plane, Rows
from kvsnap.formats.names import TokenIds, token_array

GROUP = "all"
ROPE = Rope(
    type="neox",
    base=10000.0,
    scale=1.0,
    scaling="none",
    original_context=2048,
    extension_factor=None,
    attention_factor=None,
    beta_fast=None,
    beta_slow=None,
    long_context=None,
)
"""What an engine gets unless it is told otherwise; vary one field with `dataclasses.replace`."""
_EXACT_BELOW = {"F16": 2048, "BF16": 256, "F32": 2048}
"""Integers that the type holds exactly, so that a value survives as what it was written as."""


class StampedEngine(Engine):
    """Rows are stamps instead of attention. Not for several threads at once, like any engine.

    `window` tokens are seen by one more group of layers, which keeps the rows of the last ones;
    `recurrent` bytes are the state of a layer of another. `full=False`: no layers besides these.
    `element` is F16, BF16, F32 or "rows" (bytes, as ggml's quantized types are). Every keyword but
    `batch` and `capacity` decides the stamps and the identity.
    """

    def __init__(
        self,
        *,
        weights: str = "stamped",
        element: str = "F16",
        layers: int = 2,
        kv_heads: int = 2,
        head_dim: int = 8,
        batch: int = 8,
        capacity: int = 4096,
        vocabulary: int = 500,
        architecture: str = "stamped",
        family: str = "stamped",
        rope: Rope | None = ROPE,
        shard: Shard | None = None,
        adapters: Sequence[Adapter] = (),
        projector: str | None = None,
        rotation_k: int = 0,
        window: int = 0,
        recurrent: int = 0,
        full: bool = True,
        overrides: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.batch, self.vocabulary = batch, vocabulary
        self._capacity = capacity
        self._element = element
        planes = tuple(_plane(name, element, kv_heads, head_dim) for name in ("k", "v"))
        groups = [Group(name=GROUP, layers=layers, planes=planes)] if full else []
        if window:
            groups.append(Group(name="window", layers=1, planes=planes, span=window - 1))
        if recurrent:
            page = Plane(name="s", kind="pages", dtype="U8", row=(recurrent,), source_type="state")
            groups.append(Group(name="recurrent", layers=2, planes=(page,), span=0))
        self._layout = Layout(groups=tuple(groups))
        self._span, self._recurrent = window - 1, recurrent
        self._identity = Identity(
            family=family,
            weights=weights,
            architecture=architecture,
            layout=self._layout,
            rope=rope,
            block_size=1,
            adapters=tuple(adapters),
            projector=projector,
            rotation_k=rotation_k,
            shard=shard or Shard(),
            overrides=tuple(overrides),
        )
        self._key = blake3(self._identity.canonical().encode("ascii")).digest()
        self._ids = np.empty(capacity, np.uint32)
        by_token = tuple(group for group in self._layout.groups if group.span != 0)
        self._by_token = Layout(groups=by_token)
        self._rows = self._by_token.empty(capacity)
        self._prefix = [self._key]
        self._state = self._first_state()
        self._has_logits = False
        self.held = 0
        """How many positions have rows."""
        self.evaluated = 0
        self.positions: list[int] = []
        """Every position that was computed, in order."""

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def capacity(self) -> int:
        return self._capacity

    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        return Identity(**{**vars(self._identity), "block_size": block_size})

    def token_ids(self) -> TokenIds:
        return self._ids[: self.held].copy()

    def export(self, start: int, stop: int) -> dict[str, Array]:
        if not 0 <= start <= stop <= self.held:
            raise UsageError(f"positions {start}..{stop} of {self.held} cannot be exported")
        planes = self._layout.in_blocks.planes()
        return {name: self._rows[name][:, start:stop].copy() for name in planes}

    def export_state(self) -> dict[str, Array]:
        first = max(0, self.held - self._span)
        windowed = self._rows.keys() - self._layout.in_blocks.planes().keys()
        rows = {name: self._rows[name][:, first : self.held].copy() for name in windowed}
        return rows | ({"recurrent.s": self._state.copy()} if self._recurrent else {})

    def reach(self, tokens: int) -> int:
        if not self._layout.needs_state or tokens == self.held:
            return tokens
        return tokens if not self._recurrent and self.held <= self._span else 0

    def landing(self, stop: int, start: int = 0) -> Landing:
        ranges = self._layout.ranges_at(start, stop)
        rows = self._layout.empty(ranges)
        for array in rows.values():
            array.fill(np.iinfo(array.dtype).max)  # a row that nobody fills in is no stamp
        return Landing(start, stop, rows, None)

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        start, stop = landing.start, len(token_ids)
        if stop > self._capacity:
            raise DoesNotFit(f"{stop} tokens do not fit a context of {self._capacity}")
        if not start <= stop <= landing.stop or start > self.held:
            raise UsageError(f"rows of {start}..{landing.stop} cannot make {stop} tokens")
        if self._layout.needs_state and stop != landing.stop:
            raise UsageError(f"a state of {landing.stop} tokens cannot make {stop}")
        self.truncate(start)
        for name, array in landing.rows.items():
            if name in self._layout.in_blocks.planes():
                self._rows[name][:, start:stop] = array[:, : stop - start]
            elif name in self._rows:
                self._rows[name][:, stop - array.shape[1] : stop] = array
            else:
                self._state[...] = array
        self._ids[start:stop] = token_ids[start:]
        for token in token_ids[start:].tolist():
            self._prefix.append(_next_prefix(self._prefix[-1], token))
        self.held, self._has_logits = stop, False
        self._forget_old(self._rows, stop)

    def truncate(self, tokens: int) -> None:
        if tokens >= self.held:
            return
        if self.reach(tokens) != tokens and tokens:
            raise EngineError(f"this engine cannot go back to {tokens} tokens")
        self._state = self._first_state()
        for array in self._rows.values():
            array[:, tokens : self.held] = 0  # what is forgotten must not be readable by accident
        del self._prefix[tokens + 1 :]
        self.held, self._has_logits = tokens, False

    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        if self.held + len(token_ids) > self._capacity:
            raise DoesNotFit(
                f"{self.held + len(token_ids)} tokens do not fit a context of {self._capacity}"
            )
        for start in range(0, len(token_ids), self.batch):
            part = token_ids[start : start + self.batch]
            for token in part.tolist():
                self._compute(token)
            self.evaluated += len(part)
            self._has_logits = True
            step_done(len(part))

    def sample(self) -> int:
        """The next token: a function of every row held, so wrong rows make another text.

        Raises `EngineError` where nothing was evaluated since the last load or truncation: logits
        from before would be stale.
        """
        if not self._has_logits:
            raise EngineError("there are no logits to sample from: evaluate a token first")
        hasher = blake3()
        for name in sorted(self._rows):
            hasher.update(self._rows[name][:, : self.held].tobytes())
        hasher.update(self._state.tobytes())
        return int.from_bytes(hasher.digest(8), "little") % self.vocabulary

    def expected(self, token_ids: Sequence[int] | TokenIds) -> dict[str, Array]:
        """The rows that an engine which was never interrupted holds after `token_ids`: of windowed
        layers the last ones, the others zero."""
        ids = token_array(token_ids)
        rows = self._by_token.empty(len(ids))
        prefix, state = self._key, self._first_state()
        for position, token in enumerate(ids.tolist()):
            prefix = _next_prefix(prefix, token)
            self._stamp(rows, position, prefix)
            state = _next_state(state, token)
        self._forget_old(rows, len(ids))
        return rows | ({"recurrent.s": state} if self._recurrent else {})

    def check_rows(self) -> None:
        """Raise `AssertionError` unless the rows held are exactly those of the ids held."""
        for name, rows in self.expected(self.token_ids()).items():
            own = self._rows[name][:, : self.held] if name in self._rows else self._state
            wrong = np.argwhere(rows != own)
            assert not len(wrong), (
                f"{len(wrong)} wrong elements in {name}; the first at [layer, position, element]"
                f" {wrong[0].tolist()} of {self.held} positions"
            )

    def _compute(self, token: int) -> None:
        self._prefix.append(_next_prefix(self._prefix[-1], token))
        self._ids[self.held] = token
        self._stamp(self._rows, self.held, self._prefix[-1])
        self._state = _next_state(self._state, token)
        self.positions.append(self.held)
        self.held += 1
        self._forget_old(self._rows, self.held)

    def _forget_old(self, rows: Rows, held: int) -> None:
        """Windowed layers keep the last rows only; the others must not be readable by accident."""
        for name, array in rows.items():
            if name.startswith("window."):
                array[:, : max(0, held - self._span)] = 0

    def _first_state(self) -> Array:
        seed = np.frombuffer(blake3(self._key).digest(2 * self._recurrent), np.uint8)
        return seed.reshape(2, self._recurrent).copy()

    def _stamp(self, rows: Rows, position: int, prefix: bytes) -> None:
        """One XOF stream a token; layer, plane, head and place in the head are places in it."""
        width = sum(array.shape[0] * array.shape[2] for array in rows.values())
        stream = np.frombuffer(blake3(prefix).digest(2 * width), "<u2")
        at = 0
        for name in sorted(rows):
            layers, _, row = rows[name].shape
            values = stream[at : at + layers * row].reshape(layers, row)
            rows[name][:, position] = _bits(values, self._element)
            at += layers * row


def _plane(name: str, element: str, kv_heads: int, head_dim: int) -> Plane:
    if element == "rows":
        width = kv_heads * head_dim
        return Plane(name=name, kind="rows", dtype="U8", row=(width,), source_type="bytes")
    row = (kv_heads, head_dim)
    return Plane(name=name, kind="elements", dtype=element, row=row, source_type=element.lower())


def _next_prefix(prefix: bytes, token: int) -> bytes:
    """What all rows of a position follow from: the identity and every id up to it."""
    return blake3(prefix + token.to_bytes(4, "little")).digest()


def _next_state(state: Array, token: int) -> Array:
    """A recurrence: a wrong state never becomes a right one again."""
    stream = blake3(state.tobytes() + token.to_bytes(4, "little")).digest(state.size)
    return np.frombuffer(stream, np.uint8).reshape(state.shape).copy()


def _bits(values: Array, element: str) -> Array:
    """The integers as the bits of the engine's element type."""
    if element == "rows":
        return values.astype(np.uint8)
    exact = values % _EXACT_BELOW[element]
    if element == "F16":
        return exact.astype("<f2").view("<u2")
    wide = exact.astype("<f4").view("<u4")
    return wide if element == "F32" else (wide >> 16).astype("<u2")
