"""mlx-lm's prompt caches: safetensors files of `save_prompt_cache`, in two layouts.

    mlx-lm          from 0.32 on; K and V padded to 256 rows, a scalar says how many are tokens
    mlx-lm-0.31     up to 0.31.3; K and V cut

Field by field: mlx_states.py; quantized K and V: mlx_quantized.py. Neither version of the tool reads the
other's file, and the tool compares nothing: a file of fewer layers loads.

Not in the file: token ids, model, RoPE, unless the user's metadata say so. `model` and `tokenizer_config`
there are what `mlx_lm.generate --prompt-cache-file` asks for; mlx_lm.cache_prompt writes them.

The tool's own writer (mlx/io/safetensors.cpp) puts the data in the order of a hash table. So what is
written here has the tool's names, metadata, shapes and bytes, and another order of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported, UsageError
from kvsnap.formats.interchange.foreign import Files, ForeignRows, Format, Given, only
from kvsnap.formats.interchange.heads_first import (
    SAFETENSORS_TYPES,
    Pairs,
    one_type,
    pairs_of,
    rows_of,
)
from kvsnap.formats.interchange.mlx_quantized import dequantized, in_type
from kvsnap.formats.interchange.mlx_states import (
    NEW,
    OLD,
    QUANTIZED,
    Layer,
    Layout,
    layers_of,
    layout_of,
    tokens_of,
)
from kvsnap.formats.interchange.safetensors_file import (
    ForeignTensor,
    parse_tensors,
    peek_header,
    tensor_of,
    write_tensors,
)
from kvsnap.formats.layout import Array

STEP = 256
"""Rows that a cache of 0.32 grows by (`KVCache.step`)."""
_DTYPES = {ours: theirs for theirs, ours in SAFETENSORS_TYPES.items()}


def _recognise(layout: Layout, files: Files) -> bool:
    header = peek_header(next(iter(files.values()))) if len(files) == 1 else None
    if header is None:
        return False
    return layout_of(header.pop("__metadata__", None), list(header)) is layout


def _read(layout: Layout, files: Files, given: Given) -> ForeignRows:
    file = parse_tensors(only(files))
    found = layout_of(file.metadata, list(file.tensors))
    if found is None:
        raise Damaged("the file is no prompt cache of mlx-lm: it names no class for its layers")
    if found is not layout:
        raise UsageError(f"the file has the layout of {found.format}", f"read it as {found.format}")
    name, layers = layers_of(layout, file)
    offsets = {tokens_of(name, layer) for layer in layers}
    if len(offsets) != 1:
        raise Unsupported(
            f"layers of {', '.join(map(str, sorted(offsets)))} tokens in one cache",
            "only caches that hold all tokens in all layers can be read",
        )
    tokens = offsets.pop()
    user = {
        key.removeprefix(layout.user): text
        for key, text in file.metadata.items()
        if key.startswith(layout.user)
    }
    told = {**user, "class": name}
    inexact = ""
    if name == QUANTIZED:
        planes = [(layer.tensors[:3], layer.tensors[3:]) for layer in layers]
        kind = one_type([parts[1].dtype for pair in planes for parts in pair], SAFETENSORS_TYPES)
        pairs = [
            (_decoded(k, tokens, layer, kind), _decoded(v, tokens, layer, kind))
            for layer, (k, v) in zip(layers, planes, strict=True)
        ]
        bits = sorted({layer.numbers["bits"] for layer in layers})
        inexact = f"decoded from {', '.join(map(str, bits))} bits"
    else:
        kind = one_type([t.dtype for layer in layers for t in layer.tensors], SAFETENSORS_TYPES)
        pairs = [
            (_cut(layer.tensors[0], tokens), _cut(layer.tensors[1], tokens)) for layer in layers
        ]
    return rows_of(Pairs(pairs, kind, inexact=inexact, told=told), given)


def _decoded(parts: Sequence[ForeignTensor], tokens: int, layer: Layer, kind: str) -> Array:
    return in_type(dequantized(parts, tokens, layer.numbers), kind)


def _cut(tensor: ForeignTensor, tokens: int) -> Array:
    return tensor.array()[:, :, :tokens]


def _write_new(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    pairs = pairs_of(rows, given)
    metadata = {"2.0": ""}
    tensors: dict[str, ForeignTensor] = {}
    offset = tensor_of("I32", np.array(rows.tokens, np.uint32))
    for layer, pair in enumerate(pairs):
        for at, array in enumerate(pair):
            padding = ((0, 0), (0, 0), (0, -rows.tokens % STEP), (0, 0))
            tensors[f"{layer}.{at}"] = tensor_of(_DTYPES[rows.k_type], np.pad(array, padding))
        tensors[f"{layer}.2"] = offset
        metadata |= {
            f"1.{layer}": "KVCache",
            f"2.{layer + 1}.0": f"{layer}.2",
            f"2.{layer + 1}.1": "scalar",
        }
    return _file(NEW, metadata, tensors, given)


def _write_old(rows: ForeignRows, given: Given) -> dict[str, bytes]:
    metadata: dict[str, str] = {}
    tensors: dict[str, ForeignTensor] = {}
    for layer, pair in enumerate(pairs_of(rows, given)):
        for at, array in enumerate(pair):
            tensors[f"{layer}.{at}"] = tensor_of(_DTYPES[rows.k_type], array)
        metadata |= {f"0.{layer}": "", f"2.{layer}": "KVCache"}
    return _file(OLD, metadata, tensors, given)


def _file(
    layout: Layout, metadata: dict[str, str], tensors: dict[str, ForeignTensor], given: Given
) -> dict[str, bytes]:
    if given.model_name is not None:
        # What `mlx_lm.generate --prompt-cache-file` asks for; without a name it cannot be had.
        user = {"model": given.model_name, "tokenizer_config": "{}"}
        metadata |= {f"{layout.user}{key}": text for key, text in user.items()}
    return {"prompt_cache.safetensors": write_tensors(metadata, tensors)}


MLX_LM = Format(
    NEW.format,
    "mlx-lm prompt cache, from 0.32 on",
    partial(_recognise, NEW),
    partial(_read, NEW),
    _write_new,
)
MLX_LM_0_31 = Format(
    OLD.format,
    "mlx-lm prompt cache, up to 0.31.3",
    partial(_recognise, OLD),
    partial(_read, OLD),
    _write_old,
)
