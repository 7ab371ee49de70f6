"""What decides the rows of a model that vLLM serves: its files, its configuration, each rank's caches."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsnap.engines.served_weights import (
    adapter_digest,
    code_digest,
    local_folder,
    weights_digest,
)
from kvsnap.engines.transformers_config import rope, settings
from kvsnap.engines.vllm_check import pages_of
from kvsnap.engines.vllm_plan import Facts, Family, Rank
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.formats.identity import Adapter, Identity, Rope

FAMILY = "vllm"
PRECISION = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_HUMMING_USE_F16_ACCUM",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_USE_FLASHINFER_MOE_INT4",
)
"""Variables of the environment that decide with how many bits rows are computed, or how they lie."""
MEDIA = (
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
"""Options of the server that decide what an image becomes, and are not in vLLM's digest of it."""


class Identities:
    """The identities of one engine's blocks, without and with adapters."""

    def __init__(
        self,
        config: Any,
        facts: Mapping[Rank, Facts],
        block_size: int,
        file_digest: Callable[[Path], str],
        version: str,
        model: str | None = None,
    ) -> None:
        """`config`: the VllmConfig; `version`: of vLLM. `model`: where its weights are, if not where
        vLLM says. Raises as `local_folder` and `weights_digest` do."""
        self.config, self.facts, self.block_size = config, facts, block_size
        self.file_digest, self.version = file_digest, version
        told, cache = config.model_config, config.load_config.download_dir
        place = local_folder(model or told.model, told.revision, cache)
        self.weights = weights_digest(place, file_digest)
        if model is not None:
            self._check_place(model)
        remote_code = told.trust_remote_code and place.is_dir()
        self.code = code_digest(place, file_digest) if remote_code else None
        found = sorted(place.glob("*process*config.json")) if place.is_dir() else ()
        self.processors = {path.name: file_digest(path) for path in found}
        """Of media: means, sizes, frames."""
        self._adapters: dict[tuple[str, str], str] = {}
        self._known: dict[tuple[tuple[Adapter, ...], str], Family] = {}

    def _check_place(self, model: str) -> None:
        """Raise `UsageError` where vLLM's own folder has other weights: one configuration for several
        servers would give all of them one model's name."""
        told, cache = self.config.model_config, self.config.load_config.download_dir
        try:
            own = local_folder(told.model, told.revision, cache)
            other = own.is_dir() and weights_digest(own, self.file_digest) != self.weights
        except KvsnapError:
            return  # it has none here: that is what the option is for
        if other and local_folder(model).is_dir():
            raise UsageError(
                f"option model is {model!r}, and vLLM serves other weights, from {own}",
                "leave the option away",
            )

    def plain(self) -> Family:
        return self._family(())

    def with_lora(self, lora: Any) -> Family:
        """`lora`: the LoRARequest. Raises `Unsupported` where its files are not what they were when it
        was asked for first: which of the two vLLM has in memory nobody can tell."""
        digest = adapter_digest(local_folder(lora.lora_path), self.file_digest)
        key = (lora.lora_name, lora.lora_path)
        if self._adapters.setdefault(key, digest) != digest:
            raise Unsupported(
                f"the files of adapter {lora.lora_name!r} changed while it was in use",
                "give the new ones another name",
            )
        adapter = Adapter(kind="lora", digest=digest, scale=1.0)
        return self._family((adapter,), _adapter_settings(self.config, lora))

    def _family(self, adapters: tuple[Adapter, ...], adapter_settings: str = "") -> Family:
        key = (adapters, adapter_settings)
        if key not in self._known:
            self._known[key] = self._make(*key)
        return self._known[key]

    def _make(self, adapters: tuple[Adapter, ...], adapter_settings: str) -> Family:
        model = self.config.model_config
        hf = model.hf_config.get_text_config()
        told = _engine_settings(self.config)
        told |= {"code": self.code, "pages": pages_of(self.version)}
        if model.is_multimodal_model:
            told["processors"] = self.processors
        if adapter_settings:
            told["adapter"] = adapter_settings
        own = *settings(hf), *((f"vllm.{name}", json.dumps(value)) for name, value in told.items())
        identities = {
            rank: Identity(
                family=FAMILY,
                weights=self.weights,
                architecture=str(hf.model_type),
                layout=facts.layout,
                rope=_rope(hf, model.max_model_len),
                block_size=self.block_size,
                adapters=adapters,
                shard=facts.shard,
                overrides=tuple(sorted((*own, *facts.overrides))),
            )
            for rank, facts in self.facts.items()
        }
        return {rank: identity.canonical() for rank, identity in identities.items()}


def _engine_settings(config: Any) -> dict[str, Any]:
    """What the engine makes of weights and rows, beyond what the caches themselves tell."""
    told: dict[str, Any] = {}
    model = config.model_config
    told["dtype"] = str(model.dtype).removeprefix("torch.")
    told["quantization"] = model.quantization
    told["cache_dtype"] = str(config.cache_config.cache_dtype)
    told |= {name: value for name, value in _more_settings(config).items() if value}
    if model.is_multimodal_model:  # how media become rows
        told["media"] = settings(model.hf_config)
        told["media_options"] = {
            name: str(getattr(model.multimodal_config, name)) for name in MEDIA
        }
    return told


def _more_settings(config: Any) -> dict[str, Any]:
    """Told only where there is something to tell. Rows of another implementation, of other weights than
    those in the files, or computed with fewer bits, are not the same rows."""
    model, kernels, attention = config.model_config, config.kernel_config, config.attention_config
    loaded = config.load_config
    told = {
        "architecture": model.architecture,
        "implementation": model.model_impl,
        "other_classes": model.model_class_overrides,
        "quantization_config": model.quantization_config,
        "load_format": loaded.load_format,
        "loader": loaded.model_loader_extra_config,
        "not_loaded": loaded.ignore_patterns,
        "cache_dtype_skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
        "moe_backend": kernels.moe_backend,
        "linear_backend": [kernels.linear_backend, kernels.linear_backend_per_quant],
        "query_quantization": [
            attention.disable_flashinfer_q_quantization,
            attention.use_prefill_query_quantization,
        ],
        "environment": {name: os.environ[name] for name in PRECISION if name in os.environ},
    }
    return {
        name: value if isinstance(value, str) else str(value or "") for name, value in told.items()
    }


def _adapter_settings(config: Any, lora: Any) -> str:
    """What vLLM makes of an adapter's files."""
    told = config.lora_config
    modules = sorted(told.target_modules or ())
    kinds = told.enable_mixed_moe_lora_format, told.enable_moe_shared_loras
    return f"{told.lora_dtype} {modules} {kinds} {lora.is_3d_lora_weight}"


def _rope(hf: Any, context: int) -> Rope | None:
    """vLLM picks LongRoPE's factors by the context that it was started with."""
    found = rope(hf)
    if found is None or found.scaling != "longrope":
        return found
    return dataclasses.replace(found, long_context=context > found.original_context)
