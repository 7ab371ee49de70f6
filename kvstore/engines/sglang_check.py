"""Whether the SGLang that is installed here fits, and how to start it: what `kvsnap doctor` asks."""

from __future__ import annotations

import json

from kvsnap.engines.sglang_start import RELEASES, installed_release, interface_differences

CONFIG = {
    "backend_name": "kvsnap",
    "module_path": "kvsnap.engines.sglang",
    "class_name": "KVSnapStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
}
START = (
    "start it with: python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache"
    " --hicache-storage-backend dynamic --hicache-storage-backend-extra-config"
    f" '{json.dumps(CONFIG)}'"
)
_NAME = "engine sglang"


def findings() -> list[tuple[str, str, str]]:
    """(level, what, advice); level is `ok`, `note` or `problem`. Needs no GPU, and loads no engine."""
    release = installed_release()
    if not release:
        return [("note", f"{_NAME}: it is not installed", "pip install 'kvsnap[sglang]'")]
    name = f"{_NAME}: SGLang {release}"
    try:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # half an installation
        return [("problem", f"{name} cannot be imported: {error}", "reinstall it")]
    found = interface_differences(HiCacheStorage, HiCacheStorageConfig, release)
    if found:
        advice = f"use SGLang {' or '.join(RELEASES)}, or a kvsnap that knows {release}"
        return [("problem", f"{name}: {what}", advice) for what in found]
    return [("ok", f"{name}: the storage interface is the known one", START)]
