"""The safetensors container that every kvsnap file is: written canonically, read with suspicion.

    u64 LE header length | header: JSON, sorted, padded with spaces | tensor bytes, no holes

Data starts at a multiple of 64 bytes. `__metadata__` holds strings only; its `file` field is the
BLAKE3 digest of the whole file with that field's 64 characters set to "0". Any safetensors reader
opens the result. This reader takes less than those do: no duplicate keys, no holes, bounded lengths.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvsnap.formats.errors import Damaged, UsageError

MAX_HEADER = 16 * 2**20
"""A header names a few tensors; the longest identity seen is 2 KB. Above this a file is hostile."""
ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")
_NO_DIGEST = b"0" * 64
_DIGEST_FIELD = re.compile(rb'"file":"([0-9a-f]{64})"')
_ENTRY = {"dtype", "shape", "data_offsets"}
_MAX_DIMENSIONS = 8
"""Rows have four. Without a bound, one header's product of sizes takes hours to compute."""
_MAX_NUMBER = 2**63 - 1
_ITEM_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4, "U64": 8}


@dataclass(frozen=True)
class Tensor:
    """`data` is any C-contiguous buffer of exactly the shape's bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: Any


@dataclass(frozen=True)
class Packed:
    """A file as buffers to write one after the other; nothing is joined."""

    buffers: tuple[Any, ...]
    size: int
    file_digest: str


def joined(packed: Packed) -> memoryview:
    """The whole file in one buffer; without a copy where it is one."""
    if len(packed.buffers) == 1:
        return memoryview(packed.buffers[0]).cast("B")
    return memoryview(b"".join(packed.buffers))


@dataclass(frozen=True)
class Container:
    """A parsed file. Tensor data are views of the buffer that was parsed."""

    metadata: dict[str, str]
    tensors: dict[str, Tensor]

    def field(self, key: str) -> str:
        try:
            return self.metadata[key]
        except KeyError:
            raise Damaged(f"the header has no field {key!r}") from None


def pack(metadata: Mapping[str, str], tensors: Sequence[tuple[str, Tensor]]) -> Packed:
    """Lay out one file. Equal content gives equal bytes; tensors keep the order given."""
    header: dict[str, Any] = {"__metadata__": {**metadata, "file": _NO_DIGEST.decode("ascii")}}
    offset = 0
    for name, tensor in tensors:
        end = offset + memoryview(tensor.data).nbytes
        header[name] = {
            "data_offsets": [offset, end],
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
        }
        offset = end
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + _LENGTH.size) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise UsageError(
            f"the file's header would take {len(text)} bytes, more than {MAX_HEADER}",
            "keep the session's notes shorter",
        )
    head = _LENGTH.pack(len(text)) + text
    data = [memoryview(t.data).cast("B") for _, t in tensors if memoryview(t.data).nbytes]
    hasher = blake3(head)
    for part in data:
        hasher.update(part)
    digest = hasher.hexdigest()
    head = _DIGEST_FIELD.sub(f'"file":"{digest}"'.encode("ascii"), head, count=1)
    return Packed((head, *data), len(head) + offset, digest)


def described_size(head: bytes) -> int:
    """How long the file is that begins so, by its header, which must be in `head` whole."""
    start = header_size(head[: _LENGTH.size])
    if start > len(head):
        raise Damaged(f"a header of {start} bytes")
    header = parse_header(head[_LENGTH.size : start])
    header.pop("__metadata__", None)
    return start + max((_span(name, entry)[2] for name, entry in header.items()), default=0)


def check_file_digest(buffer: memoryview) -> str:
    """Compare the `file` digest with the bytes, before anything is decoded. Returns the digest."""
    head = bytes(buffer[: _data_start(buffer)])
    found = list(_DIGEST_FIELD.finditer(head))
    if len(found) != 1:
        raise Damaged("the header holds no file digest")
    start, stop = found[0].span(1)
    hasher = blake3(head[:start] + _NO_DIGEST + head[stop:])
    hasher.update(buffer[len(head) :])
    digest: str = hasher.hexdigest()
    if digest.encode("ascii") != head[start:stop]:
        raise Damaged("the file digest differs: the bytes changed after they were written")
    return digest


def parse(buffer: memoryview) -> Container:
    """Read header and tensor views of a whole file in memory. Raises `Damaged`."""
    start = _data_start(buffer)
    header = parse_header(bytes(buffer[_LENGTH.size : start]))
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged("the header's metadata is not a table of strings")
    spans = sorted((_span(name, entry) for name, entry in header.items()), key=lambda s: s[1:])
    expected = 0
    tensors: dict[str, Tensor] = {}
    for name, begin, end, dtype, shape in spans:
        if begin != expected:
            raise Damaged(
                f"tensor {reprlib.repr(name)} does not start where the one before it ends"
            )
        tensors[name] = Tensor(dtype, shape, buffer[start + begin : start + end])
        expected = end
    if start + expected != len(buffer):
        raise Damaged(f"the file has {len(buffer)} bytes where its header says {start + expected}")
    return Container(metadata, tensors)


def header_size(first_bytes: bytes) -> int:
    """How many bytes prefix and header take, from the first 8 bytes of a file."""
    if len(first_bytes) < _LENGTH.size:
        raise Damaged(f"the file has {len(first_bytes)} bytes, not even a header length")
    size: int = _LENGTH.unpack_from(first_bytes)[0]
    if size > MAX_HEADER:
        raise Damaged(f"the header claims {size} bytes, more than any kvsnap file has")
    return _LENGTH.size + size


def parse_header(text: bytes) -> dict[str, Any]:
    """The JSON header; duplicate keys, depth bombs and non-JSON are `Damaged`."""
    try:
        header = _JSON.decode(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise Damaged("the header is not the JSON of a safetensors file") from error
    if not isinstance(header, dict):
        raise Damaged("the header is not a table")
    return header


def _data_start(buffer: memoryview) -> int:
    start = header_size(bytes(buffer[: _LENGTH.size]))
    if start > len(buffer):
        raise Damaged(f"the file is cut: {len(buffer)} bytes, its header alone takes {start}")
    return start


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise Damaged("the header has duplicate keys")
    return table


_JSON = json.JSONDecoder(object_pairs_hook=_no_duplicates)
"""Kept: to make one costs as much as to read a header with it."""


def _span(name: str, entry: Any) -> tuple[str, int, int, str, tuple[int, ...]]:
    brief = reprlib.repr(name)
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        item = _ITEM_BYTES[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"tensor {brief} is not described as safetensors are") from error
    if entry.keys() != _ENTRY or not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise Damaged(f"tensor {brief} is not described as kvsnap does")
    if any(type(n) is not int or not 0 <= n <= _MAX_NUMBER for n in (begin, end, *shape)):
        raise Damaged(f"tensor {brief} has an impossible shape or offset")
    if end - begin != math.prod(shape) * item:
        raise Damaged(f"tensor {brief} has {end - begin} bytes where its shape needs others")
    return name, begin, end, dtype, tuple(shape)
