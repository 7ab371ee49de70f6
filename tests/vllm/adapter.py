"""A LoRA adapter of the tiny model, as peft would save it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, HIDDEN, LAYERS = 8, 256, 4
OUT = {"q_proj": 256, "v_proj": 128}


def make_adapter(folder: Path, seed: int = 0) -> Path:
    """Large enough that greedy tokens become others."""
    random = torch.Generator().manual_seed(seed)
    weights = dict[str, torch.Tensor]()
    for layer in range(LAYERS):
        for name, width in OUT.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, HIDDEN, generator=random) / 16
            up = torch.randn(width, RANK, generator=random) / 4
            weights[f"{place}.lora_A.weight"] = down.bfloat16()
            weights[f"{place}.lora_B.weight"] = up.bfloat16()
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 16,
        "target_modules": sorted(OUT),
        "bias": "none",
        "base_model_name_or_path": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
