"""Rows as torch tensors on the device of an engine: the same bits as numpy makes of them.

Imported only where an engine asks for it: torch takes two seconds.
"""

from __future__ import annotations

import numpy as np
import torch

from kvsnap.formats.layout import Array, Plane

ELEMENTS: dict[str, torch.dtype] = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
}


def tensor_of(plane: Plane, rows: Array, device: str) -> torch.Tensor:
    """Bits of elements, or bytes, on a device as what they are: [layers, tokens, heads, dim]."""
    tokens = rows.shape[1] if plane.can_cut else 0
    signed = rows.view(f"i{rows.itemsize}") if rows.itemsize > 1 else rows
    values = torch.from_numpy(np.ascontiguousarray(signed)).view(ELEMENTS[plane.dtype])
    return values.reshape(plane.file_shape(rows.shape[0], tokens)).to(device)


def products(codes: Array, scale: Array, dtype: str, device: str) -> torch.Tensor:
    """`uniform.write_products` on a device: codes int8, which go over as they are, and float32 scales
    that broadcast."""
    on_device = torch.from_numpy(codes.copy()).to(device)  # of a file's bytes, which are read-only
    values: torch.Tensor = on_device.to(torch.float32) * torch.from_numpy(scale.copy()).to(device)
    return values.to(ELEMENTS[dtype])


def replaced(rows: torch.Tensor, tokens: Array, plane: Plane, exact: Array) -> torch.Tensor:
    """The rows with those of some tokens, [layers, n, width] of bits, in their place."""
    if len(tokens):
        device = str(rows.device)
        rows[:, torch.from_numpy(tokens).to(device)] = tensor_of(plane, exact, device)
    return rows
