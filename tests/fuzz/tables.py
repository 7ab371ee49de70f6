"""Safetensors files taken apart, and put together and signed again.

A file whose bytes were changed at random ends at its digest. So the digest is made anew, and tensors
get offsets that fit: what is wrong lies deeper, where only the parser of this kind of file looks.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

_DIGEST = re.compile(rb'"file":"([0-9a-f]{64})"')
_NO_DIGEST = "0" * 64


@dataclass
class Tensor:
    name: str
    dtype: str
    shape: list[int]
    data: bytes


@dataclass
class File:
    """`metadata` without its digest."""

    metadata: dict[str, Any]
    tensors: list[Tensor]


def take_apart(data: bytes) -> File:
    """A valid file's parts, the tensors in their order."""
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    metadata.pop("file")
    body = data[8 + size :]
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = [
        Tensor(name, e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for name, e in entries
    ]
    return File(metadata, tensors)


def header_of(file: File) -> dict[str, Any]:
    """Its header as JSON value, offsets as the tensors' bytes are."""
    header: dict[str, Any] = {"__metadata__": {**file.metadata, "file": _NO_DIGEST}}
    at = 0
    for tensor in file.tensors:
        end = at + len(tensor.data)
        entry = {"data_offsets": [at, end], "dtype": tensor.dtype, "shape": tensor.shape}
        header[tensor.name] = entry
        at = end
    return header


def put_together(text: str, tensors: Sequence[Tensor]) -> bytes:
    """Header text and tensors as a file, signed."""
    head = text.encode("utf-8", "surrogatepass")
    head += b" " * (-(len(head) + 8) % 64)
    body = b"".join(tensor.data for tensor in tensors)
    return sign(struct.pack("<Q", len(head)) + head + body)


def sign(data: bytes) -> bytes:
    """The same with the digest that it should have, where there is a place for one."""
    if len(data) < 8:
        return data
    (size,) = struct.unpack_from("<Q", data)
    found = _DIGEST.search(data, 8, min(len(data), 8 + size))
    if found is None:
        return data
    start, end = found.span(1)
    empty = data[:start] + _NO_DIGEST.encode() + data[end:]
    return data[:start] + blake3(empty).hexdigest().encode() + data[end:]
