"""Safetensors files of other tools: header and tensors read with suspicion, and written.

    u64 LE header length | header: JSON in UTF-8, padded with spaces | tensor bytes, no holes

    header            {"__metadata__": {str: str}, NAME: {"dtype", "shape", "data_offsets": [begin, end]}}
    data_offsets      from the first byte after the header; row-major, little-endian elements

Source: safetensors 0.8.0, safetensors/src/tensor.rs (`SafeTensors::deserialize`, `prepare`); mlx 0.32
writes its own (mlx/io/safetensors.cpp): keys sorted, data in the order of a hash table, no padding.

formats/container.py is the same container as kvsnap itself writes it, and takes less: ASCII, few
element types, a digest. Here names and metadata may be any UTF-8. What the bytes mean is not in the
file: that is the part of the formats beside this one.
"""

from __future__ import annotations

import json
import math
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.layout import Array

MAX_HEADER = 4 * 2**20
"""A quantized cache of 200 layers has 0.2 MB of header. JSON takes up to 20 times its length in
memory, so the 100 MB that other readers allow would be 2 GB."""
MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_ENTRY = {"dtype", "shape", "data_offsets"}
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
"""In the order of the library, which writes the last of them first."""
_RANK = {dtype: rank for rank, dtype in enumerate(_ITEM_BYTES)}
_ALIGNMENT = 8


@dataclass(frozen=True)
class ForeignTensor:
    """`data`: exactly the shape's bytes, as in the file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> Array:
        """The elements as unsigned integers of their width, in the tensor's shape; a view."""
        return np.frombuffer(self.data, f"<u{_ITEM_BYTES[self.dtype]}").reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsFile:
    metadata: dict[str, str]
    tensors: dict[str, ForeignTensor]
    """In the order of their data."""


def tensor_of(dtype: str, array: Array) -> ForeignTensor:
    """A tensor of the elements of `array`, which is as wide as `dtype` says."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return ForeignTensor(dtype, array.shape, flat.reshape(-1).view(np.uint8).data)


def parse_tensors(buffer: memoryview) -> SafetensorsFile:
    """Header and tensor views of a whole file in memory. Raises `Damaged`, and `Unsupported` for an
    element type that has no whole number of bytes or is not known."""
    header, start = _header(buffer)
    metadata = header.pop(_METADATA, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("the header's metadata is not a table of strings")
    spans = sorted(
        (_span(name, entry) for name, entry in header.items()), key=lambda span: span[1:3]
    )
    end = 0
    tensors: dict[str, ForeignTensor] = {}
    for name, begin, stop, dtype, shape in spans:
        if begin != end:
            raise Damaged(
                f"tensor {reprlib.repr(name)} does not start where the one before it ends"
            )
        tensors[name] = ForeignTensor(dtype, shape, buffer[start + begin : start + stop])
        end = stop
    if start + end != len(buffer):
        raise Damaged(f"the file has {len(buffer)} bytes where its header says {start + end}")
    return SafetensorsFile(metadata, tensors)


def peek_header(buffer: memoryview) -> dict[str, Any] | None:
    """The header alone, to recognise a file by; None where there is none. Entries are not checked."""
    try:
        return _header(buffer)[0]
    except Damaged:
        return None


def write_tensors(metadata: Mapping[str, str], tensors: Mapping[str, ForeignTensor]) -> bytes:
    """One file. Equal input gives equal bytes, those of the safetensors library but for the order of
    the metadata, which the library leaves to chance and is sorted here."""
    header: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-_RANK[item[1].dtype], item[0])):
        begin, end = end, end + tensor.data.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        parts.append(tensor.data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((_LENGTH.pack(len(text)), text, *parts))


def _header(buffer: memoryview) -> tuple[dict[str, Any], int]:
    available = len(buffer)
    if available < _LENGTH.size:
        raise Damaged(f"the file has {available} bytes, not even a header length")
    size: int = _LENGTH.unpack_from(buffer)[0]
    if size > MAX_HEADER:
        raise Damaged(f"this is no safetensors file of a cache: a header of {size} bytes")
    start = _LENGTH.size + size
    if start > available:
        raise Damaged(f"the file is cut: {available} bytes, its header alone takes {start}")
    try:
        header = _JSON.decode(bytes(buffer[_LENGTH.size : start]).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Damaged("the header is not the JSON of a safetensors file") from error
    if not isinstance(header, dict):
        raise Damaged("the header is not a table")
    return header, start


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise Damaged("the header has duplicate keys")
    for key, value in pairs:
        # "\ud800" is JSON and no text: what cannot be encoded fails later, where it is printed.
        for text in (key, value):
            if isinstance(text, str):
                text.encode("utf-8")
    return table


_JSON = json.JSONDecoder(object_pairs_hook=_table)


def _span(name: str, entry: Any) -> tuple[str, int, int, str, tuple[int, ...]]:
    brief = reprlib.repr(name)
    if not isinstance(entry, dict) or entry.keys() != _ENTRY:
        raise Damaged(f"tensor {brief} is not described as safetensors are")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise Damaged(f"tensor {brief} is not described as safetensors are")
    if dtype not in _ITEM_BYTES:
        raise Unsupported(f"tensor {brief} has elements of type {reprlib.repr(dtype)}")
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        raise Damaged(f"tensor {brief} has an impossible shape or offset")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in (*offsets, *shape)):
        raise Damaged(f"tensor {brief} has an impossible shape or offset")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise Damaged(f"tensor {brief} has {end - begin} bytes where its shape needs others")
    return name, begin, end, dtype, tuple(shape)
