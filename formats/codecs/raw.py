"""`raw`: rows as the engine had them, in tensors that any safetensors reader understands."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

import numpy as np

from kvsnap.formats.codecs.base import Codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array, Plane


class Raw(Codec):
    id = "raw"

    def encode(self, plane: Plane, rows: Array) -> dict[str, Tensor]:
        tokens = rows.shape[1] if plane.can_cut else 0
        return {"": Tensor(plane.dtype, plane.file_shape(rows.shape[0], tokens), rows)}

    def decode(self, plane: Plane, stored: Mapping[str, Tensor], out: Array) -> None:
        tensor = stored.get("")
        tokens = out.shape[1] if plane.can_cut else 0
        if tensor is None or len(stored) != 1:
            raise Damaged(
                f"codec raw stores one tensor a plane, not {reprlib.repr(sorted(stored))}"
            )
        if tensor.dtype != plane.dtype or tensor.shape != plane.file_shape(out.shape[0], tokens):
            raise Damaged(f"plane {plane.name} is {tensor.dtype} {tensor.shape} in the file")
        out[...] = np.frombuffer(tensor.data, plane.memory_dtype).reshape(out.shape)
