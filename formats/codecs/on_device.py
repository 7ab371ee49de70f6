"""Rows as torch tensors on the device of an engine: the same bits as numpy makes of them.

Imported only where an engine asks for it: torch takes two seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvsnap.formats.codecs.base import Codec, Stretch
from kvsnap.formats.codecs.uniform import GROUP
from kvsnap.formats.container import Tensor
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


def bytes_of(rows: torch.Tensor) -> Array:
    """Inverse of `tensor_of`, as bytes in host memory."""
    found: Array = rows.contiguous().cpu().view(torch.uint8).numpy()
    return found


def put(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copy rows into a tensor, and wait until they are there: who reads it next may be another
    thread, whose work a device does not put behind this one's."""
    out.copy_(rows)
    if out.is_cuda:
        torch.cuda.current_stream(out.device).synchronize()


def decode(
    codec: Codec,
    at: Stretch,
    stored: Mapping[str, Tensor],
    out: torch.Tensor,
    count: int,
    tokens: slice,
) -> None:
    """Of `count` tokens that are stored, put those that `out` holds into it."""
    device, layers = str(out.device), len(out)
    try:
        rows = codec.decode_on(device, at, stored, layers, count)
    except torch.cuda.OutOfMemoryError:  # says nothing against the file: as all codecs can
        rows = Codec.decode_on(codec, device, at, stored, layers, count)
    put(rows[:, tokens], out)


def carried(values: Array, device: str) -> torch.Tensor:
    """A copy on a device: a file's bytes are read-only, and the next file takes their place."""
    return torch.from_numpy(values.copy()).to(device)


def of_tokens(groups: torch.Tensor, tokens: int) -> torch.Tensor:
    """What each group of tokens has, [layers, groups, heads, dim], for each of its tokens."""
    return groups.repeat_interleave(GROUP, dim=1)[:, :tokens]


def products(codes: torch.Tensor, scale: torch.Tensor, dtype: str) -> torch.Tensor:
    """`uniform.write_products`: codes int8, and float32 scales that broadcast."""
    values: torch.Tensor = codes.to(torch.float32) * scale
    return values.to(ELEMENTS[dtype])


def replaced(rows: torch.Tensor, tokens: Array, plane: Plane, exact: Array) -> torch.Tensor:
    """The rows with those of some tokens, [layers, n, width] of bits, in their place."""
    if len(tokens):
        device = str(rows.device)
        rows[:, torch.from_numpy(tokens).to(device)] = tensor_of(plane, exact, device)
    return rows
