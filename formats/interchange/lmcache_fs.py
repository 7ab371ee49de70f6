"""LMCache's file system tier: a file for a chunk of tokens, its name a hash over all tokens up to its end.

    <model>@0x<8 hex: kv rank>@<hex: object group>@<hex: chunk hash>[@<salt>].data

(LMCache 0.5.6, multi-process server, lmcache/v1/distributed/l2_adapters/fs_l2_adapter.py.) `/` of the
model's name is `-SEP-`; kv rank = world << 24 | rank << 16 | local world << 8 | local rank. The hash of
a chunk is blake3(hash of the chunk before | token ids u32, big-endian), before the first one blake3(i64 0 |
u32 0). Only whole chunks are stored. The content has no head:

    [layers, chunk, heads, 2 * head_dim]    slots as formats/interchange/vllm_blocks.py says

(vLLM 0.32.0 on CPUs; what other devices give was not seen.) The files say neither chunk, block of the
engine, layers, heads, element type nor weights: all are given, and a size is all that can contradict
them. LMCache serves whatever has the right length. K's elements are in the order of transformers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from kvsnap.formats.errors import Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given
from kvsnap.formats.interchange.served_rows import (
    element_bytes,
    given_ids,
    given_size,
    proven_rows,
    read_parts,
    safe_model,
    stacked,
)
from kvsnap.formats.interchange.vllm_blocks import from_slots, to_slots
from kvsnap.formats.names import TokenIds, token_array

_NAME = re.compile(
    r"([^@]*)@0x([0-9a-f]{8})@([0-9a-f]{1,8})@((?:[0-9a-f]{2}){8,64})(?:@([^@]+))?\.data", re.DOTALL
)
_SLASH = "-SEP-"
ONE_RANK = 0x01000100
"""The kv rank of an engine on one device."""
_START = blake3(bytes(12)).digest()


@dataclass(frozen=True)
class ChunkName:
    """A file's name, taken apart."""

    model: str
    rank: int
    group: int
    key: str
    salt: str

    @property
    def world(self) -> int:
        return self.rank >> 24


def chunk_name(name: str) -> ChunkName | None:
    """None for what is no chunk's name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    model = found[1].replace(_SLASH, "/")
    return ChunkName(model, int(found[2], 16), int(found[3], 16), found[4], found[5] or "")


def chunk_keys(token_ids: TokenIds, chunk: int) -> list[str]:
    """The hashes of all whole chunks, in order."""
    ids = token_ids.astype(">u4")
    digest, keys = _START, []
    for start in range(0, len(ids) - chunk + 1, chunk):
        digest = blake3(digest + ids[start : start + chunk].tobytes()).digest()
        keys.append(digest.hex())
    return keys


def _recognise(files: Files) -> bool:
    return bool(files) and all(chunk_name(path.rpartition("/")[2]) for path in files)


def _read(files: Files, given: Given) -> ForeignRows:
    """Every whole chunk of the given ids must be there; those of other prompts are passed over."""
    chunk, block = _chunk_and_block(given)
    layers, heads, dim = (given_size(given, name) for name in ("layers", "heads", "head_dim"))
    wide, ids = element_bytes(given.dtype), given_ids(given)
    model, chunks = _of_one_model(files, given)
    keys = chunk_keys(ids, chunk)
    contents = read_parts(files, chunks, keys, chunk, "chunk", given)
    count = len(contents)
    planes = np.empty((2, layers, count * chunk, heads, dim), f"<u{wide}")
    for number, content in enumerate(contents):
        slots = np.frombuffer(content, f"<u{wide}").reshape(layers, chunk, heads, 2 * dim)
        part = slice(number * chunk, (number + 1) * chunk)
        for layer in range(layers):
            planes[0, layer, part], planes[1, layer, part] = from_slots(slots[layer], block)
    told = {"model": model, "chunks": str(count)}
    if len(chunks) > count:
        told["other chunks"] = str(len(chunks) - count)
    return proven_rows(planes, given, ids, told)


def _chunk_and_block(given: Given) -> tuple[int, int]:
    chunk, block = given_size(given, "chunk"), given_size(given, "block")
    if chunk % block:
        raise UsageError(
            f"a chunk of {chunk} tokens is no whole number of blocks of {block}",
            "give LMCache's chunk size and the engine's block size",
        )
    return chunk, block


def _of_one_model(files: Files, given: Given) -> tuple[str, dict[str, str]]:
    """Hash of a chunk → its path, of the model that was given, or of the only one there. Names alone
    are looked at: a server's folder holds the chunks of many prompts."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for path in files:
        name = chunk_name(path.rpartition("/")[2])
        if name is None or given.model_name not in (None, name.model):
            continue
        if name.rank != ONE_RANK:
            raise Unsupported(
                f"chunks of rank {name.rank:#010x} hold a part of the heads or layers",
                "only chunks of an engine on one device can be read",
            )
        if name.group:
            raise Unsupported("chunks of several object groups: layers that keep unlike things")
        found.setdefault((name.model, name.salt), {})[name.key] = path
    if len(found) > 1:
        names = ", ".join(repr(model[:64]) for model in sorted({model for model, _ in found})[:5])
        hint = "give model_name (--model-name), or leave out the files of other salts (the last part of the name)"
        raise UsageError(f"chunks of {len(found)} models or salts: {names}", hint)
    if not found:
        raise UsageError("none of these files is a chunk of that model", "give its folder and name")
    (model, _), chunks = next(iter(found.items()))
    return model, chunks


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    """The whole chunks of rows, for an engine on one device and requests without a salt."""
    chunk, block = _chunk_and_block(given)
    model = safe_model(given.model_name, _SLASH, "@")
    k, v = stacked(rows, given, chunk, "LMCache")
    assert rows.token_ids is not None
    written = {}
    for number, key in enumerate(chunk_keys(token_array(rows.token_ids)[: k.shape[1]], chunk)):
        part = slice(number * chunk, (number + 1) * chunk)
        layers = [to_slots(k[n, part], v[n, part], block).tobytes() for n in range(len(k))]
        written[f"{model}@{ONE_RANK:#010x}@0@{key}.data"] = b"".join(layers)
    return written


LMCACHE_FS = Format("lmcache", "LMCache fs chunks", _recognise, _read, _write, is_folder=True)
