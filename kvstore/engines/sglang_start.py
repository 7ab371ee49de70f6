"""What is checked before an SGLang process uses a store: its release, its interface, its pools.

Whatever kvsnap was not tried with is refused by name here, where a person sees it, and never guessed.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvsnap.engines.served_options import ServedOptions
from kvsnap.formats.errors import Unsupported, UsageError

RELEASES = ("0.5.23",)
"""That kvsnap was run with."""
METHODS = {
    "register_mem_pool_host": ("self", "mem_pool_host"),
    "register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
    "on_host_pools_registered": ("self",),
    "get": ("self", "key", "target_location", "target_sizes"),
    "batch_get": ("self", "keys", "target_locations", "target_sizes"),
    "set": ("self", "key", "value", "target_location", "target_sizes"),
    "batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
    "exists": ("self", "key"),
    "batch_exists": ("self", "keys", "extra_info"),
    "batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
    "batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
    "clear": ("self",),
    "get_stats": ("self",),
}
"""Of `HiCacheStorage`, with their parameters, as kvsnap implements them."""
ABSTRACT = frozenset({"get", "batch_get", "set", "batch_set", "exists"})
CONFIG = frozenset(
    {
        "tp_rank",
        "tp_size",
        "pp_rank",
        "pp_size",
        "attn_cp_rank",
        "attn_cp_size",
        "dcp_size",
        "extra_config",
    }
)
"""What of `HiCacheStorageConfig` kvsnap reads."""
POOLS = ("MHATokenToKVPoolHost",)
"""Host pools whose pages are all that a token's KV is. Others have latent rows in several forms, scales,
windows or states, and were not tried."""
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LOADED_FROM_FILES = ("auto", "safetensors", "pt", "npcache", "gguf", "mistral", "layered")
"""Values of `--load-format` with which the files in the model's folder are all of the weights."""
OWN_KEYS = (
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
)
"""Words in the extra configuration that are SGLang's."""
OTHERS_KEYS = ("block_size", "trust_media_names", "write_buffer")
"""Of kvsnap's, but of other engines."""


def read_options(extra: dict[str, Any]) -> ServedOptions:
    """What `--hicache-storage-backend-extra-config` says to kvsnap. Raises `UsageError`."""
    for key in OTHERS_KEYS:
        if key in extra:
            raise UsageError(
                f"option {key!r} is not one of SGLang's storage", "a block is one page: --page-size"
            )
    return ServedOptions.from_mapping(extra, also=OWN_KEYS)


def installed_release() -> str:
    """Empty where SGLang is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return ""


def check_interface(storage: Any, config: Any, release: str) -> None:
    """Raises `Unsupported`, naming the first thing that differs from what kvsnap was run with."""
    found = interface_differences(storage, config, release)
    if found:
        raise Unsupported(
            f"this SGLang is not one that kvsnap knows: {found[0]}",
            f"install sglang {' or '.join(RELEASES)}, or a kvsnap that knows this one",
        )


def interface_differences(storage: Any, config: Any, release: str) -> list[str]:
    """What differs in a `HiCacheStorage`, a `HiCacheStorageConfig` and the release."""
    found = []
    if release.split(".post")[0].split("+")[0] not in RELEASES:
        found.append(f"its release is {release or 'unknown'}")
    for name, expected in METHODS.items():
        method = getattr(storage, name, None)
        if method is None:
            found.append(f"HiCacheStorage has no {name}")
            continue
        parameters = tuple(inspect.signature(method).parameters)
        if parameters != expected:
            found.append(f"HiCacheStorage.{name} takes ({', '.join(parameters)})")
    more = set(getattr(storage, "__abstractmethods__", ())) - ABSTRACT
    found += [f"HiCacheStorage.{name} is abstract" for name in sorted(more)]
    fields = {field.name for field in dataclasses.fields(config)}
    found += [f"HiCacheStorageConfig has no {name}" for name in sorted(CONFIG - fields)]
    return found


def check_pool(pool: Any) -> None:
    """Raises `Unsupported` for a host pool whose pages are not all of the KV, or not in memory."""
    kind = type(pool).__name__
    if kind not in POOLS:
        raise Unsupported(
            f"host pool {kind} of SGLang is not known to kvsnap",
            "models that need it are not served",
        )
    if pool.layout not in LAYOUTS:
        raise Unsupported(
            f"host layout {pool.layout!r} is not known to kvsnap",
            f"give --hicache-mem-layout {' or '.join(LAYOUTS)}",
        )
    if getattr(pool, "kv_buffer", None) is None:
        raise Unsupported(
            f"host pool {kind} has no memory of its own", "kvsnap needs its pages in host memory"
        )
    if str(pool.device) != "cpu":
        raise Unsupported(f"the host pool is on {pool.device}", "kvsnap needs it in host memory")
    if pool.storage_format_tag is not None:
        raise Unsupported(
            f"host pages have a format of their own, {pool.storage_format_tag!r}",
            "models that need it are not served",
        )
    if pool.layer_num != pool.target_layer_num:
        raise Unsupported(
            "the host pool has layers of a draft model beside the model's own",
            "kvsnap does not serve speculative decoding with packed draft layers",
        )
    if pool.dcp_size != 1:
        raise Unsupported(
            "decode context parallelism is not known to kvsnap", "start SGLang without it"
        )


def check_other_pools(names: Iterable[str]) -> None:
    """Raises `Unsupported` where there are pools besides that of plain KV."""
    others = sorted(name for name in names if name != "kv")
    if others:
        raise Unsupported(
            f"this model keeps more than KV of every token: {', '.join(others)}",
            "kvsnap serves models of full attention only; leave --hicache-storage-backend away",
        )


def check_arguments(arguments: Any) -> None:
    """Raises `Unsupported` for what SGLang was told that kvsnap was not tried with."""
    refused = {
        "LoRA": arguments.enable_lora or arguments.lora_paths,
        "speculative decoding": arguments.speculative_algorithm,
        "a diffusion language model": arguments.dllm_algorithm,
        "hooks in its forward pass": arguments.forward_hooks,
        "experts of KTransformers": arguments.kt_weight_path,
        "a checkpoint of ModelOpt": arguments.modelopt_checkpoint_restore_path,
        "weights that another process holds": arguments.weight_cache_mode == "client",
        "a custom weight loader": arguments.custom_weight_loader,
        "weights from a checkpoint engine": arguments.checkpoint_engine_wait_weights_before_ready,
    }
    for name, told in refused.items():
        if told:
            raise Unsupported(f"SGLang is to use {name}", "kvsnap does not serve that")
    if arguments.load_format not in LOADED_FROM_FILES:
        raise Unsupported(
            f"weights are loaded as {arguments.load_format!r}: nothing tells which they are",
            f"give --load-format {' or '.join(LOADED_FROM_FILES)}",
        )
