"""The pages of one rank's KV caches: what they are, out of them, and into them.

A page is what one block of one layer takes, whole, in the order [kv heads, tokens, content] in which vLLM
shows it. Nothing inside is cut or computed with: on a CPU, K stands in it transposed, behind one another
for all tokens, and other backends have other orders. `pages` of the format hold such bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from blake3 import blake3

from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Array, Group, Layout, Plane

PLANE = "kv"


class Pages:
    """`caches`: layer name → tensor [blocks, kv heads, tokens, content], as vLLM registers them."""

    def __init__(self, caches: Mapping[str, Any], blocks: int, pages_in_block: int) -> None:
        """`blocks`: how many the caches have. `pages_in_block`: how many of vLLM's blocks make one of
        the store's. Raises `Unsupported` by name for caches of another kind."""
        self.pages_in_block = pages_in_block
        by_shape = dict[tuple[Any, ...], list[torch.Tensor]]()
        self._layers = list[str]()
        seen = set[int]()
        for name, tensor in caches.items():
            if not isinstance(tensor, torch.Tensor) or tensor.ndim != 4:
                raise Unsupported(f"the KV cache of layer {name} is no tensor of 4 dimensions")
            if tensor.shape[0] != blocks:
                raise Unsupported(
                    f"the KV cache of layer {name} has {tensor.shape[0]} blocks, not {blocks}",
                    "give vLLM a --block-size that its attention backend takes whole",
                )
            if tensor.data_ptr() in seen:
                continue  # layers that share one cache
            seen.add(tensor.data_ptr())
            self._layers.append(name)
            shape = (tuple(tensor.shape[1:]), tensor.dtype, tensor.device)
            by_shape.setdefault(shape, []).append(tensor)
        self._groups = [(f"g{number}", tensors) for number, tensors in enumerate(by_shape.values())]
        self.device = next(iter(caches.values())).device
        self.layout = Layout(groups=tuple(self._group(*group) for group in self._groups))
        self.block_bytes = self.layout.size(0)
        on_cpu = self.device.type == "cpu"
        self._beside = None if on_cpu else torch.Stream(self.device)
        """Where loads run, while vLLM computes other requests' tokens."""

    def facts(self, backend: str, layout: str, isa: str) -> tuple[tuple[str, str], ...]:
        """What else decides the bytes: whose pages they are, and how they lie in memory."""
        told: dict[str, Any] = {"backend": backend, "kv_cache_layout": layout, "isa": isa}
        # A pipeline's ranks may have as many layers each and not the same ones as an earlier time.
        told["layers"] = blake3("\n".join(self._layers).encode()).hexdigest()
        told["shapes"] = {name: list(tensors[0].shape[1:]) for name, tensors in self._groups}
        told["strides"] = {name: list(tensors[0].stride()[1:]) for name, tensors in self._groups}
        return tuple((f"vllm.{key}", json.dumps(value)) for key, value in told.items())

    def take(self, pages: Sequence[int]) -> Callable[[], list[dict[str, Array]]]:
        """Copies of whole blocks, given as all their pages. The copy has begun when this returns: what
        vLLM does to the pages afterwards comes behind it. Call the result for the rows of each block."""
        count = len(pages) // self.pages_in_block
        # Of plain memory the copy would wait for all that the device was told: a whole step.
        pinned = self.device.type == "cuda"
        own = torch.tensor(pages, dtype=torch.int64, pin_memory=pinned)
        index = own.to(self.device, non_blocking=True)
        taken = dict[str, torch.Tensor]()
        for name, tensors in self._groups:
            rows = torch.empty(
                (len(tensors), len(pages), *tensors[0].shape[1:]),
                dtype=tensors[0].dtype,
                device=self.device,
            )
            for number, tensor in enumerate(tensors):
                torch.index_select(tensor, 0, index, out=rows[number])
            taken[name] = _to_host(rows)
        done = _event(self.device)

        def rows_of_blocks() -> list[dict[str, Array]]:
            if done is not None:
                done.synchronize()
            found = [dict[str, Array]() for _ in range(count)]
            for name, rows in taken.items():
                flat = rows.view(torch.uint8).reshape(rows.shape[0], count, -1).numpy()
                for number, block in enumerate(found):
                    block[f"{name}.{PLANE}"] = flat[:, number]
            return found

        return rows_of_blocks

    def buffer(self) -> dict[str, Array]:
        """Memory of the host for one block's rows."""
        pinned = self.device.type == "cuda"
        return {
            f"{name}.{PLANE}": torch.empty(
                (len(tensors), self._row(tensors)), dtype=torch.uint8, pin_memory=pinned
            ).numpy()
            for name, tensors in self._groups
        }

    def mark(self) -> Any:
        """For `put`: all that this thread told the device to do until now."""
        return _event(self.device)

    def put(self, rows: Mapping[str, Array], pages: Sequence[int], held: int, before: Any) -> None:
        """Write one block's rows into its pages but the first `held`, behind what came `before`: a page
        may still be copied for the request that had it. All is written when this returns."""
        with torch.inference_mode(), self._beside or nullcontext():
            if self._beside is not None:
                self._beside.wait_event(before)
            index = torch.tensor(pages[held:], dtype=torch.int64, device=self.device)
            for name, tensors in self._groups:
                like = tensors[0]
                host = torch.from_numpy(rows[f"{name}.{PLANE}"]).view(like.dtype)
                shaped = host.reshape(len(tensors), self.pages_in_block, *like.shape[1:])[:, held:]
                there = shaped.to(self.device, non_blocking=True)
                for number, tensor in enumerate(tensors):
                    tensor.index_copy_(0, index, there[number])
            done = _event(self.device)
            if done is not None:
                done.synchronize()

    def _group(self, name: str, tensors: Sequence[torch.Tensor]) -> Group:
        plane = Plane(
            name=PLANE,
            kind="pages",
            dtype="U8",
            row=(self._row(tensors),),
            source_type=str(tensors[0].dtype).removeprefix("torch."),
        )
        return Group(name=name, layers=len(tensors), planes=(plane,))

    def _row(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of one layer's part of a block."""
        return tensors[0][0].numel() * tensors[0].element_size() * self.pages_in_block


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type == "cpu":
        return rows
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.device.type == "cuda")
    return host.copy_(rows, non_blocking=True)


def _event(device: torch.device) -> Any:
    """What was begun on a device until now, to wait for; None where nothing is."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
