"""An engine of your own: what an adapter has to say, on a one-layer attention model in numpy.

The suite that every adapter runs:  class TestMine(kvsnap.testing.engine_suite.EngineSuite)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from blake3 import blake3

from kvsnap.engines.base import Engine, Landing
from kvsnap.formats.errors import DoesNotFit, UsageError
from kvsnap.formats.identity import Identity
from kvsnap.formats.layout import Group, Layout, Plane, Rows
from kvsnap.formats.names import TokenIds

VOCABULARY, HEADS, DIM = 512, 2, 16
WIDTH = HEADS * DIM
PLANES = tuple(
    Plane(name=name, kind="elements", dtype="F32", row=(HEADS, DIM), source_type="f32")
    for name in ("k", "v")
)


class NumpyModel:
    """Embeddings, keys and values of one layer; the next token attends to all before it."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        shapes = {"tokens": (VOCABULARY, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH)}
        self.weights = {
            name: random.standard_normal(shape, np.float32) / 4 for name, shape in shapes.items()
        }


class NumpyEngine(Engine):
    """Holds one sequence. `rows` are float32 [1, capacity, WIDTH] of K and of V."""

    def __init__(self, model: NumpyModel, capacity: int = 1024) -> None:
        self.model, self._capacity = model, capacity
        self.ids = np.empty(capacity, np.uint32)
        self.rows = {f"all.{name}": np.zeros((1, capacity, WIDTH), "<u4") for name in ("k", "v")}
        self.held = self.evaluated = 0
        self.logits = np.zeros(VOCABULARY, np.float32)

    @property
    def layout(self) -> Layout:
        return Layout(groups=(Group(name="all", layers=1, planes=PLANES),))

    @property
    def capacity(self) -> int:
        return self._capacity

    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        """Everything that decides the rows: here the weights and nothing else."""
        digest = blake3(b"".join(w.tobytes() for _, w in sorted(self.model.weights.items())))
        return Identity(
            family="numpy-sample",
            weights=f"blake3:{digest.hexdigest()}",
            architecture="one-layer",
            layout=self.layout,
            rope=None,
            block_size=block_size,
        )

    def token_ids(self) -> TokenIds:
        return self.ids[: self.held].copy()

    def export(self, start: int, stop: int) -> Rows:
        if not 0 <= start <= stop <= self.held:
            raise UsageError(f"positions {start}..{stop} of {self.held} cannot be exported")
        return {name: array[:, start:stop].copy() for name, array in self.rows.items()}

    def landing(self, stop: int, start: int = 0) -> Landing:
        return Landing(start, stop, self.layout.empty(stop - start), None)

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        start, stop = landing.start, len(token_ids)
        if stop > self.capacity or start > self.held or not start <= stop <= landing.stop:
            raise UsageError(f"rows of {start}..{landing.stop} cannot make {stop} tokens")
        for name, array in landing.rows.items():
            self.rows[name][:, start:stop] = array[:, : stop - start]
        self.ids[:stop], self.held = token_ids, stop

    def truncate(self, tokens: int) -> None:
        self.held = min(self.held, tokens)

    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        if self.held + len(token_ids) > self.capacity:
            raise DoesNotFit(f"{self.held + len(token_ids)} tokens do not fit {self.capacity}")
        for token in token_ids.tolist():
            self._compute(token)
            step_done(1)

    def _compute(self, token: int) -> None:
        weights, at = self.model.weights, self.held
        x = weights["tokens"][token] + np.sin(np.arange(WIDTH, dtype=np.float32) * at)
        for name in ("k", "v"):
            self.rows[f"all.{name}"][0, at] = (x @ weights[name]).view("<u4")
        self.ids[at], self.held = token, at + 1
        k, v = (self.rows[f"all.{name}"][0, : self.held].view("<f4") for name in ("k", "v"))
        scores = np.exp((k @ x) / WIDTH)
        self.logits = weights["tokens"] @ (scores @ v / scores.sum())
        self.evaluated += 1
