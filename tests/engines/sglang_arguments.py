"""What `check_arguments` reads of SGLang's server arguments, as they stand by default."""

from __future__ import annotations

from typing import Any

ARGUMENTS: dict[str, Any] = {
    "enable_lora": False,
    "lora_paths": None,
    "speculative_algorithm": None,
    "custom_weight_loader": None,
    "dllm_algorithm": None,
    "forward_hooks": None,
    "kt_weight_path": None,
    "modelopt_checkpoint_restore_path": None,
    "weight_cache_mode": "off",
    "checkpoint_engine_wait_weights_before_ready": False,
    "load_format": "auto",
}
