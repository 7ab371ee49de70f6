"""A model of real shape and random weights, with a tokenizer, made in seconds: for serving engines.

    python tests/tiny_models.py OUT KIND [--dtype f32] [--seed 1]

KIND is `llama`, `gemma3` (five layers of a window of 64 tokens to one of full attention), or `smol` (the
shape of SmolLM2-135M, for what is measured: 23 kB of KV and 0.2 GFLOP a token). The
tokenizer is trained on Python's own sources, so nothing is downloaded. Needs transformers.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCABULARY = 2048
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,  # large, so that greedy tokens do not repeat and tell much
}


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=4))


def gemma3() -> Any:
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(**SHAPE, num_hidden_layers=6, sliding_window=64, layer_types=kinds)
    return Gemma3ForCausalLM(config)


def smol() -> Any:
    shape = SHAPE | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "initializer_range": 0.04,
    }
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=30))


KINDS = {"llama": llama, "gemma3": gemma3, "smol": smol}


def tokenizer() -> Any:
    """BPE over bytes: every text has ids."""
    byte_level = pre_tokenizers.ByteLevel
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = byte_level(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 48,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    made.train([str(path) for path in sources], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make(out: Path, kind: str, dtype: str = "bf16", seed: int = 0) -> Path:
    """Equal arguments give equal weights; another seed gives others of the same shapes."""
    torch.manual_seed(seed)
    KINDS[kind]().to(DTYPES[dtype]).save_pretrained(out)
    tokenizer().save_pretrained(out)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    make(told.out, told.kind, told.dtype, told.seed)


if __name__ == "__main__":
    main()
