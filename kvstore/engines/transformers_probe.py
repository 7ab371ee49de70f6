"""What a model really keeps of a token: two tokens are run through it, and the cache is looked at.

A configuration does not say it: latent attention keeps other rows from release to release, and
head sizes may differ between layers. Three rows of a batch begin with the same token:

    row 0   token, other     at positions 0, 1
    row 1   token, third     at positions 0, 1     what follows must not change the token's rows
    row 2   token, other     at positions n, n+1   its K differs by RoPE alone, in every layer

The second row tells causal attention from any other, the third proves what codecs are told of RoPE.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from kvsnap.engines.transformers_config import rope_parameters
from kvsnap.engines.transformers_layers import (
    ELEMENT_TYPES,
    Kept,
    LayerGroup,
    filled,
    make_cache,
    parts_of,
    plain,
)
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Group, Plane, PlaneRope

_FAR = 1000
"""The second position: far enough that pairs of low frequency turn, too."""
_SAME = 0.02
"""Relative error up to which rows are the same: bfloat16 rounds by 0.004, another pairing is off by
0.3 and more."""
_ROUNDING = 1e-5
"""The same of rows that were computed alike: float32 kernels may round the rows of a batch apart."""

_found: weakref.WeakKeyDictionary[Any, tuple[Any, tuple[LayerGroup, ...]]] = (
    weakref.WeakKeyDictionary()
)


def layer_groups(model: Any) -> tuple[LayerGroup, ...]:
    """Remembered as long as the model's parameters keep their types and devices."""
    placed = [(p.dtype, p.device) for p in model.parameters()]
    known = _found.get(model)
    if known is None or known[0] != placed:
        known = _found[model] = (placed, _grouped(model))
    return known[1]


def run(model: Any, token_ids: torch.Tensor, cache: Any, **more: Any) -> Any:
    """The model's forward over the next tokens [rows, tokens]; the cache takes their rows."""
    names = arguments(model)
    name = next((n for n in ("cache", "past_key_values", "cache_params") if n in names), "cache")
    more = {key: value for key, value in more.items() if key in names}
    with torch.no_grad():
        return model(input_ids=token_ids, use_cache=True, **{name: cache}, **more)


def arguments(model: Any) -> frozenset[str]:
    """Names that the model's own forward takes."""
    inner = plain(model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # peft
    return frozenset(inspect.signature(inner.forward).parameters)


def _grouped(model: Any) -> tuple[LayerGroup, ...]:
    config = model.config.get_text_config(decoder=True)
    cache = make_cache(model)
    for layer in cache.layers:
        parts_of(layer)
    embedding = model.get_input_embeddings()
    padding = getattr(embedding, "padding_idx", None)  # its embedding is zero, and tells nothing
    token, other, third = [n for n in range(4) if n != padding][:3]
    device = embedding.weight.device
    far = min([_FAR, *_limits(config)]) - 2
    positions = torch.tensor([[0, 1], [0, 1], [far, far + 1]], device=device)
    try:
        run(
            model,
            torch.tensor([[token, other], [token, third], [token, other]], device=device),
            cache,
            position_ids=positions,
            logits_to_keep=1,
        )
    except (
        Exception
    ) as error:  # a forward raises what it likes; older ones want caches of their own
        raise Unsupported(
            f"this model does not run with a DynamicCache: {type(error).__name__}: {error}",
            "use kvsnap with a newer transformers, or with another model",
        ) from error
    parts: dict[tuple[Any, ...], list[tuple[int, torch.device]]] = {}
    for number, layer in enumerate(cache.layers):
        for kind in parts_of(layer):
            kept = _kept(layer, kind)
            if kept and kind != "linear" and not all(_is_causal(k.of(layer)) for k in kept):
                raise Unsupported(
                    "in this model a token's rows depend on what follows it",
                    "use a model with causal attention",
                )
            if kept:
                ropes = tuple(_rope_of(config, k.of(layer), far) for k in kept)
                window = layer.sliding_window if kind == "sliding" else None
                where = kept[0].of(layer).device
                parts.setdefault((kind, window, kept, ropes), []).append((number, where))
    if not parts:
        raise Unsupported(
            "this model keeps no KV cache", "use a decoder that generates text token by token"
        )
    kinds = [key[0] for key in parts]
    groups = []
    for order, ((kind, window, kept, ropes), layers) in enumerate(parts.items()):
        name = kind if kinds.count(kind) == 1 else f"{kind}{kinds[:order].count(kind)}"
        group = Group(
            name=name,
            layers=len(layers),
            planes=tuple(map(_plane, kept, ropes)),
            span={"full": None, "linear": 0}.get(kind, (window or 1) - 1),
        )
        numbers, devices = zip(*layers, strict=True)
        groups.append(LayerGroup(kind, group, numbers, devices, kept))
    return tuple(groups)


def _limits(config: Any) -> list[int]:
    """Lengths beyond which a model has no positions, or RoPE takes other factors."""
    places = [getattr(config, "max_position_embeddings", None)]
    places += [p.get("original_max_position_embeddings") for p in rope_parameters(config)]
    return [int(limit) for limit in places if limit]


def _kept(layer: Any, kind: str) -> tuple[Kept, ...]:
    """The tensors of a layer; none where it takes its rows from another layer."""
    if kind == "linear":
        states = [
            Kept(
                f"{name}{index or ''}", f"{name}_states", index, state.dtype, tuple(state.shape[1:])
            )
            for name in ("conv", "recurrent")
            for index, state in getattr(layer, f"{name}_states").items()
            if state is not None
        ]
        return tuple(states)
    if not filled(layer):
        return ()
    if filled(layer) > 2 or (kind == "full" and filled(layer) != 2):
        raise Unsupported(
            "this model puts tokens of its own in front of those that it is given",
            "merge the adapter that does that, or use the model without it",
        )
    return tuple(
        Kept(plane, name, None, tensor.dtype, (int(tensor.shape[1]), int(tensor.shape[3])))
        for plane, name, tensor in (("k", "keys", layer.keys), ("v", "values", layer.values))
    )


def _plane(kept: Kept, rope: PlaneRope | None) -> Plane:
    if kept.dtype not in ELEMENT_TYPES:
        raise Unsupported(
            f"cache elements of type {kept.dtype} are not handled", "load the model as bfloat16"
        )
    dtype = ELEMENT_TYPES[kept.dtype]
    if kept.index is not None:
        size = math.prod(kept.shape) * kept.dtype.itemsize
        told = f"{dtype.lower()}[{','.join(map(str, kept.shape))}]"
        return Plane(name=kept.plane, kind="pages", dtype="U8", row=(size,), source_type=told)
    return Plane(
        name=kept.plane,
        kind="elements",
        dtype=dtype,
        row=(kept.shape[0], kept.shape[1]),
        source_type=dtype.lower(),
        rope=rope,
    )


def _is_causal(rows: torch.Tensor) -> bool:
    """Whether the first token's rows are the same before two different ones."""
    one, two = rows[:2, :, 0].float()
    rounding = max(torch.finfo(rows.dtype).eps, _ROUNDING)
    return float((one - two).norm()) <= rounding * float(one.norm())


def _rope_of(config: Any, rows: torch.Tensor, far: int) -> PlaneRope | None:
    """The facts that turn a head's row at position 0 into that at `far`; None where none does."""
    if rows.ndim != 4 or rows.shape[-2] != 2:
        return None
    near, there = rows[0, :, 0].float().cpu(), rows[2, :, 0].float().cpu()
    size = float(there.norm())
    for facts in _candidates(config, int(rows.shape[-1])):
        turned = _turned(near, facts, far)
        if size > 0 and float((turned - there).norm()) < _SAME * size:
            return facts if float((near - there).norm()) > _SAME * size else None
    return None


def _candidates(config: Any, width: int) -> Iterable[PlaneRope]:
    for facts in rope_parameters(config):
        if facts.get("rope_type") not in ("default", "linear") or not facts.get("rope_theta"):
            continue
        share = facts.get("partial_rotary_factor") or 1.0
        for pairing in ("halves", "interleaved"):
            for dims in dict.fromkeys((int(width * share) // 2 * 2, width // 2 * 2)):
                if dims >= 2:
                    yield PlaneRope(
                        pairing=pairing,
                        dims=dims,
                        base=float(facts["rope_theta"]),
                        scale=1.0 / float(facts.get("factor") or 1.0),
                    )


def _turned(rows: torch.Tensor, rope: PlaneRope, position: int) -> torch.Tensor:
    """Rows [heads, width] of position 0, as RoPE would have them at `position`."""
    half = rope.dims // 2
    angles = position * rope.scale * rope.base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    turned = rows.clone()
    if rope.pairing == "halves":
        a, b = slice(0, half), slice(half, rope.dims)
    else:
        a, b = slice(0, rope.dims, 2), slice(1, rope.dims, 2)
    turned[:, a] = rows[:, a] * cos - rows[:, b] * sin
    turned[:, b] = rows[:, b] * cos + rows[:, a] * sin
    return turned
