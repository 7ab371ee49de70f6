"""A calibration of a model that nobody ran: components are the channels themselves.

It makes `kvtc` a plain quantizer of any layout, so that stores and sessions are tested with it.
"""

from __future__ import annotations

import numpy as np

from kvsnap.formats.codecs.calibration import (
    FEATURES,
    Calibration,
    LayerGroup,
    PlaneCalibration,
)
from kvsnap.formats.layout import Layout

SPREAD = 512.0
"""Of the integers that a stamped engine's rows are made of."""


def untaught(layout: Layout, weights: str, finest: float = 0.001) -> Calibration:
    """For every plane of elements; its two rows of numbers are (kv_heads, head_dim)."""
    planes = {}
    for name, (layers, plane) in layout.planes().items():
        if plane.kind == "elements":
            heads, dim = plane.row
            width = layers * heads * dim
            group = LayerGroup(
                layers=layers,
                basis=np.eye(width, dtype=np.float32),
                mean=np.zeros(width, np.float32),
                metric=np.tile(np.eye(dim, dtype=np.float32), (layers * heads, 1, 1)),
                spread=np.full(width, SPREAD, np.float32),
                weigher=np.zeros(FEATURES, np.float32),
            )
            planes[name] = PlaneCalibration((heads, dim), (group,))
    return Calibration(weights, finest, planes)
