"""What a codec is: rows of one plane to tensors of a file, and back.

A codec is a frozen dataclass; its fields are the parameters that change decoded values. It never
sees token ids, the store or the engine. `encode` gets a C-contiguous array as `Plane.memory_shape`
says and returns the tensors to store, keyed by a suffix that is appended to `GROUP.PLANE`.
`decode` fills a caller's array of that shape, which need not be contiguous: it is usually a view
into the one buffer that the engine will take. Both release the interpreter lock in their inner
loops, keep no state and may run in several threads. Damage raises `Damaged`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kvsnap.formats.container import Tensor
from kvsnap.formats.identity import EXACT
from kvsnap.formats.layout import Array, Plane

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Which rows a codec is given: `name` is `GROUP.PLANE`, `start` the first token's position."""

    name: str
    plane: Plane
    start: int


@dataclasses.dataclass(frozen=True)
class Codec(ABC):
    """`id` is the wire id in files; `version` counts changes of what decoding gives."""

    id: ClassVar[str]
    version: ClassVar[int] = 1
    lossy: ClassVar[bool] = False
    """Its rows are not those that the engine computed, bit for bit: never under an exact root."""
    of_one_session: ClassVar[bool] = False
    """Of the lossy ones: only the session that was stored by it may restore its blocks."""

    @property
    def fidelity(self) -> str:
        """`exact`, or id, version and every field: what an identity and a file's header say."""
        if not self.lossy:
            return EXACT
        fields = sorted(dataclasses.asdict(self).items())
        return ";".join([f"{self.id}@{self.version}", *(f"{k}={v}" for k, v in fields)])

    @abstractmethod
    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        """Suffix → tensor. Never larger than the rows by more than the header entries."""

    @abstractmethod
    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        """Write the rows into `out`; what stood there does not matter."""

    def decode_on(
        self, device: str, at: Stretch, stored: Mapping[str, Tensor], layers: int, tokens: int
    ) -> torch.Tensor:
        """The same rows as a torch tensor on a device, [layers, tokens, heads, dim] of the element
        type (rows and pages as bytes). Codecs with plain codes carry those over and compute there."""
        from kvsnap.formats.codecs.on_device import tensor_of

        out = np.empty(at.plane.memory_shape(layers, tokens), at.plane.memory_dtype)
        self.decode(at, stored, out)
        return tensor_of(at.plane, out, device)

    def max_error(self, at: Stretch, rows: Array) -> Array:
        """The declared loss: a bound on |decoded - rows| of each element, as float32 that
        broadcasts to the rows' shape. Tests check it. Lossless codecs have none to declare."""
        raise NotImplementedError(f"codec {self.id} is lossless")


@dataclasses.dataclass(frozen=True)
class CalibratedCodec(Codec):
    """One that was taught a model. `calibration` is the digest of what it learnt; empty: not chosen
    yet, and nothing can be coded."""

    calibration: str = ""
