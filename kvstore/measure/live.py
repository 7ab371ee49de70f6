"""A live engine as what codecs are measured with: its own rows, its own next-token distributions."""

from __future__ import annotations

import numpy as np

from kvsnap.engines.base import LossyRows
from kvsnap.engines.text import TextEngine
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds

MEASURED = "of a measurement"
"""Fidelity of what a measurement leaves in an engine: no session stores that."""


class LiveModel:
    """Over an engine whose context is overwritten."""

    def __init__(self, engine: TextEngine) -> None:
        self.engine = engine
        self.layout: Layout = engine.layout

    def rows(self, token_ids: TokenIds) -> Rows:
        self.engine.truncate(0)
        self.engine.lossy = None
        self.engine.evaluate(token_ids)
        return self.engine.export(0, len(token_ids))

    def log_probs(self, context: TokenIds, rows: Rows, token_ids: TokenIds) -> np.ndarray:
        self.put(context, rows)
        return self.engine.log_probs(token_ids)

    def put(self, token_ids: TokenIds, rows: Rows) -> None:
        """Make the engine hold exactly these rows, marked: they may be of any codec."""
        self.engine.truncate(0)
        self.engine.lossy = LossyRows(MEASURED, 0, token_ids.copy())
        landing = self.engine.landing(len(token_ids))
        for name, array in landing.rows.items():
            array[...] = rows[name][:, : len(token_ids)]
        self.engine.load(landing, token_ids)
