"""Rows inside a file: the part that block, session and checkpoint files have in common."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3

from kvsnap.formats.codecs import Codec, Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.layout import Array, Layout, Plane, Ranges, Rows

MAX_DECODED = 2**31
"""A block of 1,024 tokens of a 405B model in f32 has half of this."""
Targets: TypeAlias = Mapping[str, Any]
"""`GROUP.PLANE` → where its rows go, or a view of that: an array as in `Rows`, or a torch tensor of
elements on a device, [layers, tokens, heads, dim]."""


def contiguous(rows: Rows) -> dict[str, np.ndarray]:
    """Copies (or the arrays themselves) that are C-contiguous, as codecs and digests want them."""
    return {name: np.ascontiguousarray(array) for name, array in rows.items()}


def check_codec(codec: Codec, layout: Layout) -> None:
    """Raise `Unsupported` where a codec cannot take one of the planes, or what it writes could not
    be read: before anything is computed, not when it is to be written."""
    if codec.lossy and get_codec(codec.fidelity) != codec:
        raise Unsupported(
            f"codec {codec.id} cannot be found again by what it says of itself, {codec.fidelity!r}",
            "its fields must read back from their text: numbers or words",
        )
    # What is in state checkpoints is stored without loss, whatever the codec of the blocks.
    part = layout.in_blocks if codec.lossy else layout
    if codec.lossy and not part.planes():
        raise Unsupported(
            f"this model has no rows of every token that codec {codec.id} could take",
            "use a lossless codec",
        )
    for name, (layers, plane) in part.planes().items():
        rows = np.zeros(plane.memory_shape(layers, 1), plane.memory_dtype)
        codec.encode(Stretch(name, plane, 0), rows)


def encode_rows(
    codec: Codec, layout: Layout, rows: Rows, ranges: int | Ranges
) -> list[tuple[str, Tensor]]:
    """Tensors of all planes, sorted by name. `rows` must be contiguous and fit the layout; `ranges`
    are their positions, or the first of them where it is the same for all planes."""
    return [
        (name + suffix, tensor)
        for name, (_, plane) in layout.planes().items()
        for suffix, tensor in sorted(
            codec.encode(Stretch(name, plane, _first(ranges, name)), rows[name]).items()
        )
    ]


def decode_rows(
    codec: Codec,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    out: Targets,
    ranges: int | Ranges,
    tokens: slice | None = None,
) -> None:
    """Fill `out` from a file's tensors. `tokens`: which of the file's tokens `out` holds; None: all."""
    left: dict[str, dict[str, Tensor]] = {}
    # One pass: a file may claim thousands of planes, and as many tensors.
    for key, tensor in tensors.items():
        name = ".".join(key.split(".", 2)[:2])
        left.setdefault(name, {})[key[len(name) :]] = tensor
    for name, (_, plane) in layout.planes().items():
        stored = left.pop(name, {})
        try:
            count = out[name].shape[1] if isinstance(ranges, int) else len(ranges[name])
            own = slice(0, count) if tokens is None else tokens
            at = Stretch(name, plane, _first(ranges, name))
            _decode(codec, at, stored, out[name], count, own)
        except (KvsnapError, MemoryError):
            raise
        except Exception as error:  # another package's codec: a miss, and no word about the file
            raise Unsupported(
                f"codec {codec.id} failed on plane {name}: {type(error).__name__}: {error}"
            ) from error
    if left:
        names = sorted(name + suffix for name, own in left.items() for suffix in own)
        raise Damaged(f"tensors that the layout does not have: {reprlib.repr(names)}")


def on_host(rows: Any) -> Array:
    """Rows of either kind of target as an array; of a tensor its bytes."""
    if isinstance(rows, np.ndarray):
        return rows
    from kvsnap.formats.codecs.on_device import bytes_of

    return bytes_of(rows)


def put_rows(plane: Plane, rows: Array, out: Any) -> None:
    """Write rows that are in host memory into a target of either kind."""
    if isinstance(out, np.ndarray):
        out[...] = rows
    else:
        from kvsnap.formats.codecs.on_device import put, tensor_of

        put(tensor_of(plane, rows, str(out.device)), out)


def _decode(
    codec: Codec, at: Stretch, stored: Mapping[str, Tensor], out: Any, count: int, tokens: slice
) -> None:
    """Of `count` tokens that are stored, those that `out` holds."""
    if not isinstance(out, np.ndarray):
        from kvsnap.formats.codecs.on_device import decode

        decode(codec, at, stored, out, count, tokens)
    elif tokens == slice(0, count):
        codec.decode(at, stored, out)
    else:
        whole = np.empty(at.plane.memory_shape(out.shape[0], count), at.plane.memory_dtype)
        codec.decode(at, stored, whole)
        out[...] = whole[:, tokens]


def _first(ranges: int | Ranges, name: str) -> int:
    return ranges if isinstance(ranges, int) else ranges[name].start


def rows_of_file(layout: Layout, tokens: int | Ranges) -> dict[str, np.ndarray]:
    """Arrays to decode a file's rows into, where the layout comes from the file itself.

    A small file must not make its reader allocate the machine's memory: `Damaged` above
    `MAX_DECODED`.
    """
    size = layout.size(tokens)
    if size > MAX_DECODED:
        raise Damaged(f"the rows would take {size} bytes, more than any block has")
    return layout.empty(tokens)


def content_of(codec: Codec, rows: Rows, coded: Mapping[str, Tensor]) -> Rows:
    """What a `content` digest covers: the decoded rows, so that it is the same for every lossless
    codec; of a lossy one the coded tensors, because what they decode to may differ in its last bit
    from one machine's matrix product to another's."""
    if not codec.lossy:
        return rows
    return {name: np.frombuffer(tensor.data, np.uint8) for name, tensor in coded.items()}


def content_digest(fields: Mapping[str, str], token_ids: bytes, rows: Rows) -> str:
    """BLAKE3 over what an engine would receive: u32 length, JSON of `fields`, ids, then planes.

    `rows` are as `content_of` says. `fields` are the header fields that decide what an engine
    receives; the planes' types and shapes stand in the JSON too.
    """
    shapes = {name: [str(array.dtype), *array.shape] for name, array in sorted(rows.items())}
    record = json.dumps([dict(fields), shapes], sort_keys=True, separators=(",", ":")).encode()
    hasher = blake3(len(record).to_bytes(4, "little") + record)
    hasher.update(token_ids)
    for name in sorted(rows):
        if rows[name].size:  # Python casts no view without elements
            hasher.update(np.ascontiguousarray(rows[name]).data.cast("B"))
    return hasher.hexdigest()
