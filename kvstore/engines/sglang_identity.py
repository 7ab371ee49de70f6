"""What decides the bytes of SGLang's host pages: the model's files and settings, types, layout, ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.engines.served_weights import local_folder, weights_digest
from kvsnap.engines.sglang_chain import WORDS
from kvsnap.engines.sglang_files import check_still_loaded
from kvsnap.engines.sglang_start import check_arguments
from kvsnap.engines.transformers_config import rope, settings
from kvsnap.formats.errors import NotFound, Unsupported
from kvsnap.formats.identity import Identity, Rope, Shard
from kvsnap.formats.layout import Group, Layout, Plane

FAMILY = "sglang"
PLANE = "page.kv"
"""All of a page, as `get_data_page` of the host pool gives it."""
PAGES = "1"
"""Which order of bytes inside a page the known releases have: another number for one that has another,
with the same layout and shape."""
_ARGUMENTS = (
    "attention_backend",
    "deepep_dispatcher_output_dtype",
    "enable_quant_communications",
    "enable_tf32_matmul",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_a2a_dispatch_type",
    "flashinfer_mxfp4_moe_precision",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "kv_cache_dtype",  # a pool's own type is that of bytes, whichever 8 bits they are
    "model_impl",
    "model_loader_extra_config",
    "modelopt_quant",
    "moe_runner_backend",
    "prefill_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_on_policy_target",
    "rl_quant_profile",
)
"""What SGLang can be told that changes weights or KV after the files were read."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the process serves, as far as it decides KV."""

    folder: Path
    architecture: str
    rope: Rope | None
    settings: tuple[tuple[str, str], ...]


def served_model(given: str | None) -> Model:
    """The model of this scheduler process, from SGLang's own arguments; `given` says where its files
    are, if not where SGLang says. Raises `Unsupported` for what kvsnap does not serve."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    check_arguments(arguments)
    config = ModelConfig.from_server_args(arguments)
    if config.is_multimodal:
        raise Unsupported(
            "SGLang tells images and sounds apart by few bits of a page's hash",
            "kvsnap serves text models only",
        )
    text = config.hf_text_config
    told = {name: getattr(arguments, name) for name in _ARGUMENTS}
    told |= {"dtype": config.dtype, "quantization": config.quantization}
    folder = _folder(arguments, given)
    check_still_loaded(folder, starting=arguments.hicache_storage_backend is not None)
    return Model(
        folder=folder,
        architecture=str(text.model_type),
        rope=rope(text),
        settings=(*settings(text), *_named({k: v for k, v in told.items() if v})),
    )


def _folder(arguments: Any, given: str | None) -> Path:
    """Where SGLang says that the files are; only if they are not there, where the option says: one
    configuration for several servers would give all of them one model's name."""
    try:
        return local_folder(arguments.model_path, arguments.revision, arguments.download_dir)
    except NotFound:
        if given is None:
            raise
        return local_folder(given)


def page_layout(pool: Any) -> Layout:
    """One plane of a page's bytes, to be taken whole."""
    page_bytes = pool.size_per_token * pool.page_size
    plane = Plane(
        name=PLANE.partition(".")[2],
        kind="pages",
        dtype="U8",
        row=(page_bytes,),
        source_type=str(pool.dtype).removeprefix("torch."),
    )
    return Layout(groups=(Group(name=PLANE.partition(".")[0], layers=1, planes=(plane,)),))


def identity_of(
    pool: Any, config: Any, model: Model, file_digest: Callable[[Path], str]
) -> Identity:
    """Of one rank's host pages. `config`: SGLang's `HiCacheStorageConfig`."""
    told = {
        "code": {path.name: file_digest(path) for path in _beside(model.folder)},
        "layout": pool.layout,
        "layers": [pool.start_layer, pool.end_layer, pool.layer_num],
        "page_size": pool.page_size,
        "pages": PAGES,
        "pool": type(pool).__name__,
        "shape": [pool.head_num, pool.head_dim, pool.v_head_dim],
    }
    return Identity(
        family=FAMILY,
        weights=weights_digest(model.folder, file_digest),
        architecture=model.architecture,
        layout=page_layout(pool),
        rope=model.rope,
        block_size=WORDS,
        shard=Shard(
            tensor_rank=config.tp_rank,
            tensor_size=config.tp_size,
            pipeline_rank=config.pp_rank,
            pipeline_size=config.pp_size,
            context_rank=config.attn_cp_rank,
            context_size=config.attn_cp_size,
        ),
        overrides=tuple(sorted((*model.settings, *_named(told)))),
    )


def _beside(folder: Path) -> list[Path]:
    """Files besides weights and configuration that may decide what is computed from them."""
    if not folder.is_dir():
        return []
    return sorted([*folder.glob("*.py"), *folder.glob("hf_quant_config.json")])


def _named(told: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"sglang.{name}", json.dumps(value, sort_keys=True, default=str))
        for name, value in sorted(told.items())
    )
