"""Real host pools of SGLang over small buffers, and a storage on one as SGLang's factory makes it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvsnap.engines.sglang_identity import Model

PAGE = 16
PAGES = 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def host_pool(
    layout: str = "layer_first",
    dtype: torch.dtype = torch.bfloat16,
    *,
    layers: int = 3,
    heads: int = 2,
    dim: int = 8,
    pages: int = PAGES,
    page_size: int = PAGE,
) -> Any:
    """Its pages hold random values; page 0 begins at index 0."""
    tokens = pages * page_size
    shape = (page_size, heads, dim)  # the device's side is not used: one page of it is enough
    k, v = ([torch.zeros(shape, dtype=dtype) for _ in range(layers)] for _ in range(2))
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=tuple(k),
            v=tuple(v),
            k_data_ptrs=pointers[0],
            v_data_ptrs=pointers[1],
            layout=next(iter(KVBufferLayout)),
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=dim,
        v_head_dim=dim,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    pool = MHATokenToKVPoolHost(
        info,
        host_to_device_ratio=1.0,
        host_size=0,
        page_size=page_size,
        layout=layout,
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
    )
    torch.manual_seed(1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    return pool


def page_hashes(count: int, seed: str = "a") -> list[str]:
    return [hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(count)]


def indices(first: int, count: int, page_size: int = PAGE) -> torch.Tensor:
    """Of pages from the `first` on, one index a token, as SGLang gives them."""
    return torch.arange(first * page_size, (first + count) * page_size, dtype=torch.int64)


def pages_of(pool: Any, first: int, count: int) -> list[bytes]:
    size = pool.page_size
    found = [pool.get_data_page((first + n) * size).view(torch.uint8) for n in range(count)]
    return [bytes(page.numpy().tobytes()) for page in found]


def wipe(pool: Any) -> None:
    pool.kv_buffer.zero_()


def behind(keys: list[str] | None) -> Any:
    return HiCacheStorageExtraInfo(prefix_keys=keys)


def model_in(folder: Path, weights: bytes = b"weights", **changed: Any) -> Model:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    told = {"folder": folder, "architecture": "llama", "rope": None, "settings": ()} | changed
    return Model(**told)


def make_storage(pool: Any, extra: dict[str, Any], **config: Any) -> Any:
    """Through SGLang's own factory, with the calls that its controller makes."""
    told: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": pool.layout == "page_first",
        "model_name": "served",
        "extra_config": {
            "backend_name": "kvsnap",
            "module_path": "kvsnap.engines.sglang",
            "class_name": "KVSnapStorage",
            "interface_v1": 1,
            **extra,
        },
    }
    storage = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(**(told | config)), pool
    )
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.on_host_pools_registered()
    return storage


def blocks(folder: Path) -> list[Path]:
    """The block files of a store, by their place in a chain."""
    found = folder.glob("blocks/*/*.safetensors")

    def start(path: Path) -> int:
        with safe_open(path, "np") as file:
            return int(file.metadata()["start"])

    return sorted(found, key=start)
