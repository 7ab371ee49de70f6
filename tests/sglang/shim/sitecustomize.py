"""What SGLang 0.5.23 lacks on a machine without a GPU, for tests. Put its folder on PYTHONPATH.

Real in such a run: the engine, its scheduler, radix tree, HiCache controller with its threads and
queues, host pools with their layouts, page hashes, the factory and every call of the storage backend,
the model's forward pass on the CPU with torch's attention, and sampling.

Replaced, here and in the two packages beside:
- copies between "device" and host pages (`sgl_kernel.kvcacheio`): three functions in torch, as
  builtins, because SGLang imports them on CUDA, ROCm and XPU only and leaves the names unbound;
- events and streams of torch.cpu: on a CPU a copy is done when the call returns;
- page-locked memory: `pin_memory` is dropped, CUDA's registration of host memory does nothing;
- the 10 GiB of memory that HiCache leaves free on any machine: none are left free;
- `sgl_kernel` and `torchvision`: see there.

So a test that passes with it says nothing about copy kernels, streams and their order, or pinning.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

POOLS = "sglang.srt.mem_cache.pool_host.base"


class _NoReserve(MetaPathFinder):
    """Changes one number of the module `POOLS` once that was imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != POOLS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # type: ignore[attr-defined]

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install() -> None:
    import builtins

    import torch

    def first_of_pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
        return (indices.long() // page_size).view(-1, page_size)[:, 0]

    def transfer_kv_direct(
        src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int = 1
    ) -> None:
        """Token rows, layer by layer, either way; layer_first has the device's own order."""
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices.long().cpu()] = source[src_indices.long().cpu()]

    def transfer_kv_all_layer_direct_lf_pf(
        src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
    ) -> None:
        """Device, K layers then V layers [tokens, heads, dim], to host pages [pages, layers, ...]."""
        layers = len(src_ptrs) // 2
        pages = first_of_pages(dst_indices, page_size)
        for half, target in enumerate(dst_ptrs):
            for layer in range(layers):
                source = src_ptrs[half * layers + layer]
                rows = source[src_indices.long()]
                target[pages, layer] = rows.view(-1, page_size, *source.shape[1:])

    def transfer_kv_per_layer_direct_pf_lf(
        src_ptrs: Any,
        dst_ptrs: Any,
        src_indices: Any,
        dst_indices: Any,
        layer_id: int,
        page_size: int,
    ) -> None:
        """Host pages to one layer of the device."""
        pages = first_of_pages(src_indices, page_size)
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            target[dst_indices.long()] = source[pages, layer_id].reshape(-1, *target.shape[1:])

    copies = (
        transfer_kv_direct,
        transfer_kv_all_layer_direct_lf_pf,
        transfer_kv_per_layer_direct_pf_lf,
    )
    for copy in copies:
        setattr(builtins, copy.__name__, copy)

    class Event:
        """Of work that is done when the call returns."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, stream: Any = None) -> None:
            pass

        def wait(self, stream: Any = None) -> None:
            pass

        def synchronize(self) -> None:
            pass

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return 0.0

    class CudaRuntime:
        def cudaHostRegister(self, *args: Any) -> int:
            return 0

        def cudaHostUnregister(self, *args: Any) -> int:
            return 0

        def cudaGetErrorString(self, *args: Any) -> str:
            return ""

    def nothing(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    torch.cpu.Event = Event
    torch.cuda.cudart = CudaRuntime
    torch.Tensor.record_stream = nothing
    for name in ("synchronize", "wait_event", "wait_stream", "record_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, nothing)

    def unpinned(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    for name in ("zeros", "empty", "ones", "full", "tensor"):
        setattr(torch, name, unpinned(getattr(torch, name)))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    _install()
    sys.meta_path.insert(0, _NoReserve())
