"""Rows out of a `DynamicCache` and into one: [rows, heads, tokens, dim] there, token-major here.

Copies to and from a GPU go through page-locked memory and do not block one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvsnap.engines.transformers_layers import Kept, LayerGroup, check_cache, filled, make_cache
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.layout import Array, Layout, Ranges, Rows
from kvsnap.formats.rowset import Targets
from kvsnap.kvstore.host_memory import HostMemory

_DECODING = 2**28
"""Bytes of a device that are left for decoding: eight threads, each with codes, float32 factors and
products and the rows of one block's plane, some 30 MB where the model is large."""
_SIGNED = {2: np.int16, 4: np.int32}
_MAKE_ANEW = "make the cache anew: DynamicCache(config=model.config)"


class CacheRows:
    """Reads and writes caches of one model."""

    def __init__(self, model: Any, groups: Sequence[LayerGroup]) -> None:
        self.model, self.groups = model, tuple(groups)
        self.layout = Layout(groups=tuple(g.group for g in self.groups))
        self._gpus = {d for g in self.groups for d in g.devices if d.type == "cuda"}
        self.on_gpu = bool(self._gpus)
        self._memory = HostMemory(pinned=self.on_gpu)
        self._classes = [type(layer) for layer in make_cache(model).layers]

    def check(self, cache: Any) -> None:
        """Raise `Unsupported` for caches and layers that this model's own cache does not have."""
        check_cache(cache)
        found = [type(layer) for layer in cache.layers]
        if found and found != self._classes:
            odd = next(
                (
                    name.__name__
                    for name, own in zip(found, self._classes, strict=False)
                    if name != own
                ),
                f"{len(found)} layers",
            )
            raise Unsupported(f"the cache has {odd} where this model's has others", _MAKE_ANEW)

    def tokens(self, cache: Any) -> int | None:
        """How many tokens a cache holds, from its tensors; None where no layer of it says, which is
        so in models of recurrent layers only."""
        self.check(cache)
        tensors = self.tensors(cache)
        if not tensors:
            return 0
        counts = set()
        for group in self.groups:
            for layer in (cache.layers[number] for number in group.numbers):
                self._check_shapes(layer, group)
                if group.kind == "full":
                    counts.add(filled(layer))
                elif group.kind == "sliding":
                    counts.add(layer.cumulative_length)
                    if filled(layer) < min(layer.cumulative_length, group.group.span or 0):
                        raise Unsupported("a sliding-window layer lacks rows", _MAKE_ANEW)
        if len(counts) > 1:
            raise Unsupported(f"the cache's layers hold {sorted(counts)} tokens", _MAKE_ANEW)
        return counts.pop() if counts else None

    def batch(self, cache: Any) -> int:
        """How many sequences a cache holds."""
        return max((int(tensor.shape[0]) for tensor in self.tensors(cache)), default=1)

    @torch.no_grad()
    def export(self, cache: Any, start: int, stop: int) -> dict[str, Array]:
        """Rows of positions [start, stop) of the groups in blocks."""
        rows = self._take(self.layout.in_blocks, stop - start)
        for group in self.groups:
            if group.kind == "full":
                self._read(cache, group, rows, start, stop)
        self._wait()
        return rows

    @torch.no_grad()
    def export_state(self, cache: Any, position: int) -> dict[str, Array]:
        """Windows and recurrent states, at the position where the cache stands."""
        groups = [group for group in self.groups if group.kind != "full"]
        layout = Layout(groups=tuple(group.group for group in groups))
        rows = self._take(layout, layout.ranges_at(0, position))
        for group in groups:
            if group.kind == "linear":
                self._read_pages(cache, group, rows)
            else:
                kept = filled(cache.layers[group.numbers[0]])
                wanted = min(position, group.group.span or 0)
                self._read(cache, group, rows, kept - wanted, kept)
        self._wait()
        return rows

    def landing(self, start: int, stop: int) -> dict[str, Array]:
        """Arrays that `put` takes, to be filled."""
        return self._take(self.layout, self.layout.ranges_at(start, stop))

    def device_landing(self, start: int, stop: int) -> dict[str, Any]:
        """As `landing`, but rows of full attention are tensors on their device. Not of layers that are
        spread over several devices; and none where a device has no room for them and for what `put`
        makes of them."""
        there = [g for g in self.groups if g.kind == "full" and len(set(g.devices)) == 1]
        others = Layout(groups=tuple(g.group for g in self.groups if g not in there))
        try:
            # Workers that decode are not in the caller's inference mode, and could not write there.
            with torch.inference_mode(mode=False):
                rows: dict[str, Any] = {
                    f"{group.group.name}.{kept.plane}": torch.empty(
                        (len(group.numbers), stop - start, *kept.shape),
                        dtype=kept.dtype,
                        device=group.devices[0],
                    )
                    for group in there
                    for kept in group.kept
                }
            room = [_room(group, stop) for group in there]
        except RuntimeError:  # how torch says that a device has no memory
            return dict(self.landing(start, stop))
        del room
        self._wait()  # for work that uses this memory still, which workers are not behind
        return {**rows, **self._take(others, self.layout.ranges_at(start, stop))}

    @torch.no_grad()
    def put(self, cache: Any, start: int, rows: Targets, stop: int) -> None:
        """Make a cache hold its first `start` tokens, then the rows up to `stop`, and the state there.

        Its layers are made anew, and put into it when all is on its device."""
        layers = make_cache(self.model).layers
        for group in self.groups:
            for order, number in enumerate(group.numbers):
                made = [self._placed(group, kept, rows, order, stop - start) for kept in group.kept]
                if group.kind == "linear":
                    _set_states(layers[number], group.kept, made)
                    continue
                keys, values = made
                layers[number].lazy_initialization(keys, values)
                if group.kind == "full" and start:
                    old = cache.layers[number]
                    keys = torch.cat([old.keys[:, :, :start], keys], dim=-2)
                    values = torch.cat([old.values[:, :, :start], values], dim=-2)
                layers[number].keys, layers[number].values = keys, values
                if group.kind == "sliding":
                    layers[number].cumulative_length = stop
        self._wait()
        cache.layers = layers

    def reach(self, cache: Any, held: int, tokens: int) -> int:
        """The last position, at most `tokens`, that `cut` can go back to."""
        if tokens >= held or not self.layout.needs_state:
            return min(tokens, held)
        for group in self.groups:
            if group.kind == "linear":
                return 0
            first = held - filled(cache.layers[group.numbers[0]])
            if group.kind == "sliding" and max(0, tokens - (group.group.span or 0)) < first:
                return 0
        return tokens

    def cut(self, cache: Any, held: int, tokens: int) -> None:
        """Forget all tokens but the first ones, a number that `reach` gave."""
        if tokens == 0:
            cache.layers = make_cache(self.model).layers
            return
        for group in self.groups:
            for layer in (cache.layers[number] for number in group.numbers):
                left = tokens - held + filled(layer) if group.kind == "sliding" else tokens
                layer.keys, layer.values = layer.keys[:, :, :left], layer.values[:, :, :left]
                if group.kind == "sliding":
                    layer.cumulative_length = tokens

    def tensors(self, cache: Any) -> list[torch.Tensor]:
        """All that the cache's known layers hold, to tell whether somebody changed it."""
        return [
            kept.of(cache.layers[number])
            for group in self.groups
            for number in group.numbers
            for kept in group.kept
            if cache.layers and kept.of(cache.layers[number]) is not None
        ]

    def _check_shapes(self, layer: Any, group: LayerGroup) -> None:
        for kept in group.kept:
            tensor = kept.of(layer)
            if tensor is None or tensor.numel() == 0:
                continue
            found: tuple[int, ...] = tuple(_newest(tensor, kept).shape[1:])
            if kept.index is None:
                found = (int(tensor.shape[1]), int(tensor.shape[3]))
            if (tensor.dtype, found) != (kept.dtype, kept.shape):
                raise Unsupported(
                    f"the cache's {kept.attribute} are {tensor.dtype} {found},"
                    f" the model's {kept.dtype} {kept.shape}",
                    "run the model outside autocast, and use a cache of this very model",
                )

    def _take(self, layout: Layout, tokens: int | Ranges) -> dict[str, Array]:
        rows = layout.empty(tokens)
        if not self._memory.pinned:
            return rows
        return {
            name: self._memory.take(array.nbytes).view(array.dtype).reshape(array.shape)
            for name, array in rows.items()
        }

    def _read(self, cache: Any, group: LayerGroup, rows: Rows, start: int, stop: int) -> None:
        for kept in group.kept:
            out = _tensor(rows[f"{group.group.name}.{kept.plane}"], kept)
            for target, number in zip(out, group.numbers, strict=True):
                source = kept.of(cache.layers[number]).detach()[0, :, start:stop]
                target.copy_(source.transpose(0, 1), non_blocking=self._memory.pinned)

    def _read_pages(self, cache: Any, group: LayerGroup, rows: Rows) -> None:
        for kept in group.kept:
            out = _tensor(rows[f"{group.group.name}.{kept.plane}"], kept)
            for target, number in zip(out, group.numbers, strict=True):
                source = _newest(kept.of(cache.layers[number]).detach(), kept)
                target.copy_(source[0], non_blocking=self._memory.pinned)

    def _placed(
        self, group: LayerGroup, kept: Kept, rows: Targets, order: int, tokens: int
    ) -> torch.Tensor:
        """One layer's tensor on its device, contiguous as a forward leaves it: kernels choose by
        strides. Of full attention the first `tokens` rows: damage may have left fewer."""
        plane = rows[f"{group.group.name}.{kept.plane}"]
        source = (plane if isinstance(plane, torch.Tensor) else _tensor(plane, kept))[order]
        if group.kind == "full":
            source = source[:tokens]
        # Brought over as it is, and turned there: only then the copy does not block.
        there = source.to(group.devices[order], non_blocking=self._memory.pinned)
        turned = there if kept.index is not None else there.transpose(0, 1)
        target = torch.empty((1, *turned.shape), dtype=kept.dtype, device=there.device)
        target[0].copy_(turned)
        return target

    def _wait(self) -> None:
        """Until copies that do not block have ended."""
        if self._memory.pinned:
            for gpu in self._gpus:
                torch.cuda.synchronize(gpu)


def _room(group: LayerGroup, tokens: int) -> torch.Tensor:
    size = Layout(groups=(group.group,)).size(tokens) + _DECODING
    return torch.empty(size, dtype=torch.uint8, device=group.devices[0])


def _set_states(layer: Any, every: Sequence[Kept], made: Sequence[torch.Tensor]) -> None:
    """A fresh recurrent layer takes its states as those of a first forward."""
    for kept, state in zip(every, made, strict=True):
        put = layer.update_conv_state if kept.plane[:4] == "conv" else layer.update_recurrent_state
        put(state, state_idx=kept.index)
        layer.has_previous_state[kept.index] = True


def _newest(states: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Of convolution states that record their past, the part that the next forward takes."""
    return states[..., -kept.shape[-1] :] if kept.attribute == "conv_states" else states


def _tensor(array: Array, kept: Kept) -> torch.Tensor:
    """The same memory as elements: [layers, tokens, heads, dim], or [layers, state]."""
    bits = torch.from_numpy(array if array.itemsize == 1 else array.view(_SIGNED[array.itemsize]))
    shape = array.shape[:2] if kept.index is None else array.shape[:1]
    return bits.view(kept.dtype).view(*shape, *kept.shape)
