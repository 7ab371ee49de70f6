"""A live engine as what codecs are measured with: its own rows, its own next-token distributions."""

from __future__ import annotations

import numpy as np

from kvsnap.engines.base import Engine
from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.fidelity import mark_lossy

MEASURED = "of a measurement"
"""Fidelity of what a measurement leaves in an engine: no session stores that."""


def require_cut(engine: Engine) -> None:
    """Raise `Unsupported` for an engine that cannot be put back to any position and measured there."""
    if engine.layout.needs_state:
        raise Unsupported(
            "this model keeps state besides the rows of its tokens, and cannot be measured so",
            "measure one that can be cut at any position; saving and resuming works with both",
        )


class LiveModel:
    """Over an engine whose context is overwritten. `exact` are rows that are the engine's own; all
    others are marked when they are put into it."""

    def __init__(self, engine: TextEngine, *exact: Rows) -> None:
        require_cut(engine)
        self.engine = engine
        self.layout: Layout = engine.layout
        self._exact = list(exact)

    def rows(self, token_ids: TokenIds) -> Rows:
        self.engine.truncate(0)
        self.engine.evaluate(token_ids)
        self._exact.append(self.engine.export(0, len(token_ids)))
        return self._exact[-1]

    def log_probs(self, context: TokenIds, rows: Rows, token_ids: TokenIds) -> np.ndarray:
        self.put(context, rows)
        return self.engine.log_probs(token_ids)

    def put(self, token_ids: TokenIds, rows: Rows) -> None:
        """Make the engine hold exactly these rows."""
        self.engine.truncate(0)
        landing = self.engine.landing(len(token_ids))
        for name, array in landing.rows.items():
            array[...] = rows[name][:, : len(token_ids)]
        if not any(rows is own for own in self._exact):
            mark_lossy(self.engine, MEASURED, landing, token_ids)
        self.engine.load(landing, token_ids)
