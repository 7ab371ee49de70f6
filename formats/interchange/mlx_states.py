"""What a prompt cache of mlx-lm holds, layer by layer: the two layouts of its tensors and metadata.

Tensor names and metadata keys are the paths of a flattened tree (mlx-lm 0.32.2 and 0.31.0,
mlx_lm/models/cache.py, `save_prompt_cache` and the `state` of each class; i: layer, n: 1, 2, ...):

                        from 0.32 on                           up to 0.31.3
    metadata            0.KEY     the user's                   0.i       "" or 0.i.m, see below
                        1.i       class name                   1.KEY     the user's
                        2.0       ""                           2.i       class name
                        2.n.0     name of a scalar tensor
                        2.n.1     "scalar"
    KVCache             i.0 K, i.1 V, padded to a multiple     i.0 K, i.1 V, cut
                        of 256 rows or more; i.2 offset
    RotatingKVCache     i.0 K, i.1 V, i.2.. offset, keep,      i.0 K, i.1 V, 0.i.0.. keep, max_size,
                        max_size, idx                          offset, idx
    QuantizedKVCache    i.0.0.. data, scales, biases of K,     i.0.0.. and i.1.0.. the same, cut;
                        i.1.0.. of V; i.2.. offset,            0.i.0.. offset, group_size, bits
                        group_size, bits

K and V are [batch, heads, rows, head_dim] in the model's type; scalars are I32 of shape []. `offset` is
the number of tokens. The files name no version: "2.0" is "" (or missing) in one and a class name in
the other, and neither version of the tool reads the other's file.

A RotatingKVCache keeps `keep` first rows and the last ones. Once it had more tokens than max_size, rows
between are gone, and those that are there were computed with a window of max_size tokens: in one
prefill chunk too, where all rows are still there. Before that it is a KVCache.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.mlx_quantized import quantized_rows
from kvsnap.formats.interchange.safetensors_file import ForeignTensor, SafetensorsFile

QUANTIZED = "QuantizedKVCache"
_ROTATING = "RotatingKVCache"
_NAME = re.compile(r"[0-9]+(\.[0-9]+)+")
_NUMBER = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True)
class _Class:
    """Names of a class's tensors below the layer's number, and its numbers in both layouts' order."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    info: tuple[str, ...]


_CLASSES = {
    "KVCache": _Class(("0", "1"), ("offset",), ()),
    QUANTIZED: _Class(
        ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2"),
        ("offset", "group_size", "bits"),
        ("offset", "group_size", "bits"),
    ),
    _ROTATING: _Class(
        ("0", "1"),
        ("offset", "keep", "max_size", "idx"),
        ("keep", "max_size", "offset", "idx"),
    ),
}


@dataclass(frozen=True)
class Layout:
    """Where in the metadata the names of the classes and the user's own entries stand."""

    format: str
    classes: str
    user: str


NEW = Layout("mlx-lm", "1.", "0.")
OLD = Layout("mlx-lm-0.31", "2.", "1.")


@dataclass(frozen=True)
class Layer:
    """`numbers`: offset and what else the class has; `tensors`: K, V or the six parts of both."""

    numbers: Mapping[str, int]
    tensors: Sequence[ForeignTensor]


def layout_of(metadata: object, names: Sequence[str]) -> Layout | None:
    if not isinstance(metadata, dict) or not {"0.0", "0.0.0"} & set(names):
        return None
    if not all(map(_NAME.fullmatch, names)):
        return None
    if metadata.get("2.0"):
        return OLD
    return NEW if metadata.get("1.0") else None


def layers_of(layout: Layout, file: SafetensorsFile) -> tuple[str, list[Layer]]:
    """The name of the class of all layers, and what each holds. No tensor may be left over."""
    classes = {k: v for k, v in file.metadata.items() if k.startswith(layout.classes)}
    if classes.keys() != {f"{layout.classes}{layer}" for layer in range(len(classes))}:
        raise Damaged("the file's list of classes has holes, or holds something else")
    names = sorted(set(classes.values()))
    if len(names) > 1:
        raise Unsupported(
            f"layers of several kinds in one cache: {reprlib.repr(names)}",
            "kvsnap reads caches whose layers all hold all tokens",
        )
    if names[0] not in _CLASSES:
        known = ", ".join(_CLASSES)
        raise Unsupported(
            f"mlx-lm's cache class {reprlib.repr(names[0])} is not known", f"known classes: {known}"
        )
    kind = _CLASSES[names[0]]
    extra = range(2, 2 + len(kind.scalars)) if layout is NEW else ()
    below = (*kind.tensors, *map(str, extra))
    wanted = {f"{layer}.{name}" for layer in range(len(classes)) for name in below}
    if file.tensors.keys() != wanted:
        odd = sorted(file.tensors.keys() ^ wanted)
        raise Damaged(
            f"a cache of {len(classes)} layers of {names[0]} has other tensors:"
            f" {reprlib.repr(odd[0])} is too much or missing"
        )
    if layout is NEW:
        _check_scalars(file.metadata, wanted)
    found = [
        Layer(
            _scalars(file, layer, kind) if layout is NEW else _info(file.metadata, layer, kind),
            [file.tensors[f"{layer}.{name}"] for name in kind.tensors],
        )
        for layer in range(len(classes))
    ]
    return names[0], found


def _check_scalars(metadata: Mapping[str, str], tensors: set[str]) -> None:
    """The list of what is no array to the tool; it may be missing, as the tool accepts."""
    for key, text in metadata.items():
        if not key.startswith("2.") or key == "2.0":
            continue
        if key.endswith(".0") and text in tensors:
            continue
        if text == "none":
            raise Unsupported("the cache is empty: a layer has no K and V")
        if not key.endswith(".1") or text != "scalar":
            raise Unsupported(f"a cache with {reprlib.repr(key)}: {reprlib.repr(text)}")


def _scalars(file: SafetensorsFile, layer: int, kind: _Class) -> dict[str, int]:
    found: dict[str, int] = {}
    for at, name in enumerate(kind.scalars, start=2):
        tensor = file.tensors[f"{layer}.{at}"]
        if tensor.dtype != "I32" or tensor.shape:
            raise Damaged(
                f"{name} of layer {layer} is one I32, not {tensor.dtype} {list(tensor.shape)}"
            )
        found[name] = int.from_bytes(tensor.data, "little", signed=True)
    return found


def _info(metadata: Mapping[str, str], layer: int, kind: _Class) -> dict[str, int]:
    if not kind.info:
        if metadata.get(f"0.{layer}"):
            raise Damaged(f"layer {layer} has information that its class does not have")
        return {}
    found: dict[str, int] = {}
    for at, name in enumerate(kind.info):
        text = metadata.get(f"0.{layer}.{at}", "")
        if not _NUMBER.fullmatch(text):
            raise Damaged(f"{name} of layer {layer} is {reprlib.repr(text)}, not a number")
        found[name] = int(text)
    return found


def tokens_of(name: str, layer: Layer) -> int:
    """How many tokens a layer holds, if that is all of them from position 0 on, in their order."""
    if name == QUANTIZED:
        rows = quantized_rows(layer.tensors[:3])
        same = quantized_rows(layer.tensors[3:]) == rows
    else:
        k, v = (tensor.shape for tensor in layer.tensors)
        if len(k) != 4 or len(v) != 4:
            raise Unsupported(f"K and V of shapes {list(k)} and {list(v)}, not of four axes")
        rows, same = k[2], k[2] == v[2]
    if not same:
        raise Damaged("K and V of a layer have different numbers of rows")
    offset = layer.numbers.get("offset", rows)
    if name == _ROTATING and offset > layer.numbers["max_size"]:
        raise Unsupported(
            f"a RotatingKVCache of {layer.numbers['max_size']} rows that had {offset} tokens: the"
            " rows between are gone, or were computed with a window",
            "save a cache made without --max-kv-size",
        )
    if not 0 < offset <= rows or layer.numbers.get("idx", offset) != offset:
        raise Damaged(f"a layer of {rows} rows says that it holds {offset} tokens")
    return offset
