"""What decides the rows of a live transformers model, and what is refused because nobody can tell.

The attention implementation is not part of it: that changes rounding only. Names and paths are not,
nor what only steers generation.
"""

from __future__ import annotations

import json
from typing import Any

from blake3 import blake3
from transformers import PreTrainedConfig

from kvsnap.engines.transformers_code import check_code, own_code
from kvsnap.engines.transformers_config import rope, rope_parameters, settings
from kvsnap.engines.transformers_layers import plain
from kvsnap.engines.transformers_weights import weights_digest
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.identity import Adapter, Identity
from kvsnap.formats.layout import Layout

FAMILY = "transformers"

_LENGTH_DECIDES = ("dynamic",)
"""RoPE whose frequencies follow the length of the whole sequence: a prefix has no rows of its own."""

_MEDIA = ("image", "video", "audio", "vision_start", "vision_end")
_SENSES = ("vision", "audio", "vq", "protein")
"""How the inner configurations of models that take more than text begin."""


def check_model(model: Any) -> None:
    """Raise `Unsupported` by name for what cannot be restored exactly."""
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise Unsupported(
            f"a {type(model).__name__} is no transformers model with a configuration",
            "give the model as from_pretrained returns it",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise Unsupported(
            "encoder-decoder models are not handled", "use a decoder-only model with kvsnap"
        )
    if any(module.training for module in model.modules()):
        raise Unsupported("the model is in training mode: dropout is random", "call model.eval()")
    inner = [name for name in getattr(config, "sub_configs", ()) if name.startswith(_SENSES)]
    if inner and not media_tokens(model):
        raise Unsupported(
            f"this model takes more than text ({inner[0]}), and none of its token ids tells where",
            "use kvsnap with its text model alone",
        )
    check_code(plain(model))
    for facts in rope_parameters(config.get_text_config(decoder=True)):
        if facts.get("rope_type") in _LENGTH_DECIDES:
            raise Unsupported(
                f"with RoPE of type {facts['rope_type']!r} a prefix depends on what follows",
                "load the model with another rope_type",
            )


def context_of(model: Any) -> int | None:
    """The tokens up to which rows are a prefix's own: where long RoPE changes its factors."""
    config = model.config.get_text_config(decoder=True)
    limits = [
        int(facts["original_max_position_embeddings"])
        for facts in rope_parameters(config)
        if facts.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def media_tokens(model: Any) -> frozenset[int]:
    """Ids that stand for images, sound or video: they do not tell which."""
    names = [f"{kind}{end}" for kind in _MEDIA for end in ("_token_id", "_token_index")]
    inner = [getattr(model.config, name, None) for name in getattr(model.config, "sub_configs", ())]
    configs = [model.config, *inner]
    found = (getattr(config, name, None) for config in configs for name in names)
    return frozenset(token for token in found if isinstance(token, int))


def identity_of(model: Any, layout: Layout, block_size: int) -> Identity:
    model = plain(model)
    config = model.config.get_text_config(decoder=True)
    return Identity(
        family=FAMILY,
        weights=weights_digest(model),
        architecture=str(config.model_type),
        layout=layout,
        rope=rope(config),
        block_size=block_size,
        adapters=_adapters(model),
        overrides=(*settings(config), *own_code(model)),
    )


def _adapters(model: Any) -> tuple[Adapter, ...]:
    """What peft's layers apply beside their weights, which the weights' digest covers: which
    adapters are active, with what scales, and whether they are merged or off."""
    told = []
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if isinstance(scaling, dict) and hasattr(module, "active_adapters"):
            active = [str(a) for a in module.active_adapters]
            off = bool(getattr(module, "disable_adapters", False))
            merged = [str(a) for a in getattr(module, "merged_adapters", ())]
            scales = {a: float(scaling[a]) for a in active if a in scaling}
            told.append([name, active, scales, off, merged])
    if not told:
        return ()
    every = {scale for _, _, scales, _, _ in told for scale in scales.values()}
    digest = blake3(json.dumps(told, sort_keys=True).encode()).hexdigest()
    scale = every.pop() if len(every) == 1 else 1.0
    return (Adapter(kind="lora", digest=f"blake3:{digest}", scale=scale),)
