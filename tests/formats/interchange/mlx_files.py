"""mlx-lm files for tests: real ones changed in one place, and rows to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvsnap.formats.interchange.foreign import HALVES, ForeignRows
from kvsnap.formats.interchange.safetensors_file import (
    ForeignTensor,
    parse_tensors,
    tensor_of,
    write_tensors,
)
from tests.formats.interchange.sample_rows import one_file

Edit = Callable[[dict[str, str], dict[str, ForeignTensor]], Any]
"""Changes metadata and tensors."""
NEW, OLD = "mlx_lm_0.32.2_kvcache.safetensors", "mlx_lm_0.31.0_kvcache.safetensors"


def edited(name: str, edit: Edit) -> dict[str, memoryview]:
    file = parse_tensors(one_file(name)[name])
    edit(file.metadata, file.tensors)
    return {"x": memoryview(write_tensors(file.metadata, file.tensors))}


def i32(number: int) -> ForeignTensor:
    return tensor_of("I32", np.array(number, np.int32).view(np.uint32))


def zeros(*shape: int, dtype: str = "BF16", item: int = 2) -> ForeignTensor:
    return tensor_of(dtype, np.zeros(shape, f"u{item}"))


def made(tokens: int = 3, kind: str = "bf16", item: int = 2) -> ForeignRows:
    random = np.random.default_rng(tokens)
    planes = random.integers(0, 256**item, (2, 2, tokens, 6), f"u{item}")
    return ForeignRows(
        k=tuple(planes[0]),
        v=tuple(planes[1]),
        k_type=kind,
        v_type=kind,
        order=HALVES,
        heads=2,
        head_dim=3,
    )
