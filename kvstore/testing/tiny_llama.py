"""Random Llamas of a few hundred kilobytes for transformers."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The argument's name changed between releases."""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "eos_token_id": 499,
}


def tiny_llama(
    kind: type[LlamaForCausalLM] = LlamaForCausalLM, *, seed: int = 0, **settings: Any
) -> Any:
    """Grouped-query attention, four heads on two. `settings` change the configuration's `SIZES`."""
    torch.manual_seed(seed)
    return kind(LlamaConfig(**{**SIZES, **settings})).eval()
