"""The layer classes of transformers' caches that kvsnap knows, and what each of them keeps.

A class that is not in the table is refused by its name: new ones register themselves from modeling
files, and what they keep besides keys and values (indexers, compressed states, quantized rows) nobody
can guess from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Group

_PARTS: dict[str, tuple[str, ...]] = {
    "DynamicLayer": ("full",),
    "DynamicSlidingWindowLayer": ("sliding",),
    "LinearAttentionLayer": ("linear",),
    "LinearAttentionAndFullAttentionLayer": ("full", "linear"),
    "LinearAttentionAndSlidingWindowAttentionLayer": ("sliding", "linear"),
    "DummyLayer": (),  # takes its rows from another layer
}
"""Class of `transformers.cache_utils` → the kinds of state that a layer of it keeps."""

_KNOWN = {
    getattr(cache_utils, name): parts
    for name, parts in _PARTS.items()
    if hasattr(cache_utils, name)
}
_HINT = "use kvsnap with DynamicCache(config=model.config), which generate() makes by itself"

ELEMENT_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Kept:
    """One tensor that each layer of a group keeps: where it is, and its shape without the batch.

    `index`: which of several states of a recurrent layer; None for `keys` and `values`.
    """

    plane: str
    attribute: str
    index: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, layer: Any) -> torch.Tensor:
        value = getattr(layer, self.attribute)
        found: torch.Tensor = value if self.index is None else value[self.index]
        return found


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind and shape. `kind` is "full", "sliding" or "linear"."""

    kind: str
    group: Group
    numbers: tuple[int, ...]
    devices: tuple[torch.device, ...]
    kept: tuple[Kept, ...]


def parts_of(layer: Any) -> tuple[str, ...]:
    """The kinds of state of a layer; raises `Unsupported` with its class where that is not known."""
    if type(layer) not in _KNOWN:
        raise Unsupported(f"cache layers of class {type(layer).__name__} are not handled", _HINT)
    parts = _KNOWN[type(layer)]
    if "linear" in parts and not isinstance(layer.conv_states, dict):
        raise Unsupported(
            f"cache layers of class {type(layer).__name__} are not handled as this release of"
            " transformers has them",
            "use the newest transformers",
        )
    return parts


def check_cache(cache: Any) -> None:
    """Raise `Unsupported` unless it is a plain `DynamicCache` of known layers."""
    if type(cache) is not DynamicCache:
        raise Unsupported(f"caches of class {type(cache).__name__} are not handled", _HINT)
    if cache.offloading:
        raise Unsupported("offloaded caches are not handled", _HINT)
    for layer in cache.layers:
        parts_of(layer)


def filled(layer: Any) -> int:
    """Tokens whose keys and values an attention layer holds, read from the tensors themselves."""
    if not layer.is_initialized or layer.keys is None or layer.keys.numel() == 0:
        return 0
    if layer.keys.shape[:3:2] != layer.values.shape[:3:2]:
        raise Unsupported("keys and values of a cache layer hold different tokens", _HINT)
    return int(layer.keys.shape[-2])


def make_cache(model: Any) -> DynamicCache:
    """An empty cache of the layers that `generate()` would make for this model."""
    return DynamicCache(config=model.config)


def plain(model: Any) -> Any:
    """The module itself, where `torch.compile` wrapped it."""
    return getattr(model, "_orig_mod", model)
