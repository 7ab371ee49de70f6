"""`raw`: rows as the engine had them, in tensors that any safetensors reader understands."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array


@dataclass(frozen=True)
class Raw(Codec):
    id = "raw"

    def encode(self, at: Stretch, rows: Array) -> dict[str, Tensor]:
        plane = at.plane
        tokens = rows.shape[1] if plane.can_cut else 0
        return {"": Tensor(plane.dtype, plane.file_shape(rows.shape[0], tokens), rows)}

    def decode(self, at: Stretch, stored: Mapping[str, Tensor], out: Array) -> None:
        plane = at.plane
        tensor = stored.get("")
        tokens = out.shape[1] if plane.can_cut else 0
        if tensor is None or len(stored) != 1:
            raise Damaged(
                f"codec raw stores one tensor a plane, not {reprlib.repr(sorted(stored))}"
            )
        if tensor.dtype != plane.dtype or tensor.shape != plane.file_shape(out.shape[0], tokens):
            raise Damaged(f"plane {at.name} is {tensor.dtype} {tensor.shape} in the file")
        out[...] = np.frombuffer(tensor.data, plane.memory_dtype).reshape(out.shape)
