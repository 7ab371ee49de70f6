"""`unverified`: rows that came out of another tool's file and that nobody compared with the model's own.

Bit for bit what the file had, coded as `zstd` does; but not `exact`, which means that the engine computed
them. Such a chain has a root of its own, because the digest of the rows is part of its fidelity, so
nothing but the session that was imported finds it; and what an engine computes on top of such rows is of
this fidelity, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.codecs.zstd import Zstd
from kvsnap.formats.container import Tensor
from kvsnap.formats.layout import Array

_ZSTD = Zstd()


@dataclasses.dataclass(frozen=True)
class Unverified(Codec):
    """`source`: hex digest of the rows that were imported."""

    id = "unverified"
    lossy = True
    of_one_session = True

    source: str = ""

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        return _ZSTD.encode(at, rows)

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        _ZSTD.decode(at, stored, out)

    def max_error(self, at: Stretch, rows: Array) -> Array:
        return np.zeros((1, 1, 1), np.float32)
