"""quant.cpp's `.kv` files: K and V of a context, and nothing of its tokens.

`quant_save_context` (quant.cpp bd347db, quant.h), all little-endian:

    "QKVC" | u32 version = 1 | u32 n_layers | u32 kv_dim | u32 max_seq | u32 n_tokens | u32 kv_type
    u32 v_fp16 | 32 zero bytes                                                           64 bytes in all
    per layer: f32 K [n_tokens, kv_dim] | quantized K, where kv_type < 13 | f32 or f16 V, or none

kv_type counts the tool's own quantized types; 13 is their number and means none: then K and V are f32
and the whole file is 64 + n_layers * n_tokens * kv_dim * 8 bytes. With a quantized type the K area
is all zero, one block a token is written where there should be one a head, and V is not written: such a
file cannot be read, whatever the tool itself makes of it. v_fp16 = 1 looks like that in the header too,
so only the exact size says that V is there.

Not in the file: token ids, heads and head size apart, RoPE, model, checksum. K has the GGUF file's order.
The tool checks neither version nor size, and reads a file that is cut as zeros. The form without a
head that its command line writes (`--save-kv`) has nothing to know it by.
"""

from __future__ import annotations

import struct

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import GGUF, Files, ForeignRows, Format, Given, only
from kvsnap.formats.names import token_array

_MAGIC = b"QKVC"
_HEAD = struct.Struct("<4s7I32s")
_VERSION = 1
_NOT_QUANTIZED = 13
_CONTEXT = 2048
"""max_seq of the file that the tool itself wrote; it takes any that is not below n_tokens."""


def _recognise(files: Files) -> bool:
    return len(files) == 1 and bytes(next(iter(files.values()))[:4]) == _MAGIC


def _read(files: Files, given: Given) -> ForeignRows:
    buffer = only(files)
    if len(buffer) < _HEAD.size:
        raise Damaged(f"a quant.cpp file of {len(buffer)} bytes is shorter than its head")
    magic, version, layers, width, max_seq, tokens, kv_type, v_fp16, rest = _HEAD.unpack_from(
        buffer
    )
    if magic != _MAGIC:
        raise Damaged(f"a quant.cpp file starts with {_MAGIC!r}, not {magic!r}")
    if version != _VERSION:
        raise Unsupported(f"a quant.cpp file of version {version} is not known (known: {_VERSION})")
    if kv_type < _NOT_QUANTIZED:
        missing = "K in part only" if v_fp16 else "no V, and K in part only"
        raise Unsupported(
            f"a quant.cpp file of quantized type {kv_type} holds {missing}: the rest was not written",
            "save it from a context with kv_compress=0, the only one that quant.cpp saves whole",
        )
    if kv_type != _NOT_QUANTIZED or v_fp16:
        raise Unsupported(
            f"a quant.cpp file with kv_type {kv_type} and v_fp16 {v_fp16} is not known",
            "save it from a context with kv_compress=0",
        )
    if not layers or not width or not 0 < tokens <= max_seq or any(rest):
        raise Damaged(
            f"a quant.cpp file of {layers} layers, {tokens} of {max_seq} tokens and rows of {width}"
        )
    size = _HEAD.size + layers * tokens * width * 8
    if len(buffer) != size:
        raise Damaged(f"a quant.cpp file of {len(buffer)} bytes where its head says {size}")
    area = np.frombuffer(buffer, "<u4", offset=_HEAD.size).reshape(layers, 2, tokens, width)
    token_ids = None if given.token_ids is None else token_array(given.token_ids)
    if token_ids is not None and len(token_ids) != tokens:
        raise UsageError(
            f"the file holds the rows of {tokens} tokens, and {len(token_ids)} token ids were given",
            "give the ids of exactly the tokens that were saved",
        )
    return ForeignRows(
        k=tuple(area[:, 0]),
        v=tuple(area[:, 1]),
        k_type="f32",
        v_type="f32",
        order=GGUF,
        token_ids=token_ids,
        told={"version": str(version), "max_seq": str(max_seq)},
    )


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    if rows.order != GGUF:
        raise UsageError(
            f"quant.cpp has K in the order of its GGUF file, and these rows are in order {rows.order}",
            "convert the rows first",
        )
    if (rows.k_type, rows.v_type) != ("f32", "f32") or rows.rotation != (0, 0):
        raise UsageError(
            f"quant.cpp files hold plain f32, and these rows are K {rows.k_type}, V {rows.v_type}",
            "a session that was saved with --cache-type-k f32 --cache-type-v f32 fits",
        )
    if given.version not in (None, _VERSION):
        raise Unsupported(f"version {given.version} cannot be written", f"version {_VERSION} can")
    if not rows.k or not rows.tokens:
        raise UsageError("a file of no rows holds nothing to restore")
    width = rows.k[0].shape[-1]
    if (
        len(rows.k) != len(rows.v)
        or not width
        or any(
            area.shape != (rows.tokens, width) or area.dtype != np.uint32
            for area in (*rows.k, *rows.v)
        )
    ):
        raise UsageError("quant.cpp files hold K and V of equal size in all layers")
    shape = (len(rows.k), width, max(_CONTEXT, rows.tokens), rows.tokens)
    head = _HEAD.pack(_MAGIC, _VERSION, *shape, _NOT_QUANTIZED, 0, b"")
    parts = [head]
    for k, v in zip(rows.k, rows.v, strict=True):
        parts += [k.astype("<u4", copy=False).tobytes(), v.astype("<u4", copy=False).tobytes()]
    return {"context.kv": b"".join(parts)}


QUANTCPP = Format(
    "quant.cpp",
    "quant.cpp context file",
    _recognise,
    _read,
    _write,
    order=GGUF,
    has_versions=True,
)
