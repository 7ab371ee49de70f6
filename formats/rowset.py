"""Rows inside a file: the part that block, session and checkpoint files have in common."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping

import numpy as np
from blake3 import blake3

from kvsnap.formats.codecs import Codec, Stretch, get_codec
from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, KvsnapError, Unsupported
from kvsnap.formats.layout import Layout, Ranges, Rows

MAX_DECODED = 2**31
"""A block of 1,024 tokens of a 405B model in f32 has half of this."""


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
    out: Mapping[str, np.ndarray],
    ranges: int | Ranges,
) -> None:
    """Fill `out` (arrays or views as the layout says) from a file's tensors."""
    left = set(tensors)
    for name, (_, plane) in layout.planes().items():
        own = {key for key in left if key == name or key.startswith(name + ".")}
        stored = {key[len(name) :]: tensors[key] for key in own}
        try:
            codec.decode(Stretch(name, plane, _first(ranges, name)), stored, out[name])
        except (KvsnapError, MemoryError):
            raise
        except Exception as error:  # another package's codec: a miss, and no word about the file
            raise Unsupported(
                f"codec {codec.id} failed on plane {name}: {type(error).__name__}: {error}"
            ) from error
        left -= own
    if left:
        raise Damaged(f"tensors that the layout does not have: {reprlib.repr(sorted(left))}")


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
