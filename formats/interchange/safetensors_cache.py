"""A transformers cache as people write it with safetensors: `save_file({f"k_{i}": layer.keys, ...})`.

    k_{layer}, v_{layer}    [batch, heads, tokens, head_dim], layers 0, 1, 2, ... without a gap
    __metadata__            whatever the user put there; told, not used

Nothing of model, RoPE, padding or token ids is in it, and no name says that it is a KV cache: it is
recognised by having these tensors and no other. Written as the safetensors library writes it (seen:
0.8.0), with `num_tokens` for those who look.
"""

from __future__ import annotations

import re

from kvsnap.formats.errors import Damaged
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given, only
from kvsnap.formats.interchange.heads_first import (
    SAFETENSORS_TYPES,
    Pairs,
    one_type,
    pairs_of,
    rows_of,
)
from kvsnap.formats.interchange.safetensors_file import (
    parse_tensors,
    peek_header,
    tensor_of,
    write_tensors,
)

_NAME = re.compile(r"[kv]_[0-9]+")
_DTYPES = {ours: theirs for theirs, ours in SAFETENSORS_TYPES.items()}


def _recognise(files: Files) -> bool:
    if len(files) != 1:
        return False
    header = peek_header(next(iter(files.values()))) or {}
    names = header.keys() - {"__metadata__"}
    return {"k_0", "v_0"} <= names and all(map(_NAME.fullmatch, names))


def _read(files: Files, given: Given) -> ForeignRows:
    file = parse_tensors(only(files))
    count = max(len(file.tensors) // 2, 1)
    if file.tensors.keys() != {f"{plane}_{layer}" for layer in range(count) for plane in "kv"}:
        raise Damaged(
            "the file's tensors are not k_0, v_0, k_1, v_1 and so on",
            "it is of another format, or some layers are missing",
        )
    kind = one_type([tensor.dtype for tensor in file.tensors.values()], SAFETENSORS_TYPES)
    layers = [
        (file.tensors[f"k_{layer}"].array(), file.tensors[f"v_{layer}"].array())
        for layer in range(count)
    ]
    return rows_of(Pairs(layers, kind, told=file.metadata), given)


def _write(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    tensors = {
        f"{plane}_{layer}": tensor_of(_DTYPES[rows.k_type], array)
        for layer, pair in enumerate(pairs_of(rows, given))
        for plane, array in zip("kv", pair, strict=True)
    }
    return {"cache.safetensors": write_tensors({"num_tokens": str(rows.tokens)}, tensors)}


SAFETENSORS_CACHE = Format(
    "safetensors", "transformers cache in safetensors (k_0, v_0, ...)", _recognise, _read, _write
)
