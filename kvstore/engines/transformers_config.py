"""What a transformers configuration decides of rows; serving engines read the same configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from kvsnap.formats.identity import Rope

_SAYS_NOTHING = re.compile(
    r"_?(model_)?name_or_path|transformers_version|(torch_)?dtype|use_cache|architectures|auto_map"
    r"|\w+_token_id|output_attentions|output_hidden_states|return_dict|id2label|label2id"
    r"|problem_type|initializer_range|max_position_embeddings|attention_dropout|pretraining_tp"
    r"|_?attn_implementation\w*|_?experts_implementation\w*|tie_word_embeddings"
)
"""Of a configuration: does not decide rows, or is told by the weights themselves. Anything else,
known or not, is part of the identity."""

_LENGTH_IS_NOTHING_TO = ("default", "linear", "llama3")
"""RoPE whose frequencies and factors do not follow from `max_position_embeddings`."""


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """All that the model applies: one, or one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [v for v in found.values() if isinstance(v, dict)]


def settings(config: Any) -> tuple[tuple[str, str], ...]:
    """What a configuration says differently from its class: a new release's new defaults must not
    rename everything that is stored."""
    told: dict[str, Any] = dict(config.to_diff_dict())
    kinds = {facts.get("rope_type", "default") for facts in rope_parameters(config)}
    if not kinds <= set(_LENGTH_IS_NOTHING_TO):
        told["context"] = getattr(config, "max_position_embeddings", None)
    return tuple(
        (name, json.dumps(value, sort_keys=True, default=str))
        for name, value in sorted(told.items())
        if not _SAYS_NOTHING.fullmatch(name) and not _is_gguf(value)
    )


def _is_gguf(value: Any) -> bool:
    """Where weights were read from a GGUF file, they are plain ones in memory."""
    return isinstance(value, Mapping) and value.get("quant_method") == "gguf"


def rope(config: Any) -> Rope | None:
    """Of models with several, that of full attention; the settings have them all."""
    every = getattr(config, "rope_parameters", None) or {}
    found = rope_parameters(config)
    facts = every.get("full_attention") or (found[0] if found else None)
    if not facts or not facts.get("rope_theta"):
        return None
    kind = str(facts.get("rope_type", "default"))
    trained = int(getattr(config, "max_position_embeddings", None) or 0)
    return Rope(
        type="transformers",
        base=float(facts["rope_theta"]),
        scale=1.0 / float(facts.get("factor") or 1.0),
        scaling=kind,
        original_context=int(
            facts.get("original_max_position_embeddings") or (0 if kind == "default" else trained)
        ),
        extension_factor=None,
        attention_factor=_number(facts.get("attention_factor")),
        beta_fast=_number(facts.get("beta_fast")),
        beta_slow=_number(facts.get("beta_slow")),
        long_context=False if kind == "longrope" else None,
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
