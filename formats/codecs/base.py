"""What a codec is: rows of one plane to tensors of a file, and back.

A codec never sees the token ids, the store or the engine. `encode` gets a C-contiguous array as
`Plane.memory_shape` says and returns the tensors to store, keyed by a suffix that is appended to
`GROUP.PLANE`. `decode` fills a caller's array of that shape, which need not be contiguous: it is
usually a view into the one buffer that the engine will take. Both release the interpreter lock in
their inner loops, keep no state and may run in several threads. Damage raises `Damaged`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from kvsnap.formats.container import Tensor
from kvsnap.formats.layout import Array, Plane


class Codec(ABC):
    """`id` is the wire id in files; `lossy` codecs are part of an identity's fidelity."""

    id: ClassVar[str]
    lossy: ClassVar[bool] = False

    @abstractmethod
    def encode(self, plane: Plane, rows: Array) -> dict[str, Tensor]:
        """Suffix → tensor. Never larger than the rows by more than the header entries."""

    @abstractmethod
    def decode(self, plane: Plane, stored: Mapping[str, Tensor], out: Array) -> None:
        """Write the rows into `out`, each element once."""
