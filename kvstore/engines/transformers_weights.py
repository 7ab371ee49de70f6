"""A digest of the weights that a live module really has: parameters and buffers, bytes and all.

torch does not tell whether weights changed: `p.data.mul_(2)` and `p.data = other`, which is how adapters
are merged, move no version counter, and tensors of inference mode have none. In memory of the host they
are hashed at each call, which is as fast as any look at all of them. On a device the digest of a tensor
is remembered, and a sum in which each word counts by its place says whether it is still the same: the
weights are read once, as computing a token does, and do not come to the host.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from blake3 import blake3

from kvsnap.formats.errors import Unsupported

_CHUNK = 1 << 28
"""Bytes that are brought to the host at a time."""
_ROW = 1 << 16
"""Words of 8 bytes in one sum."""
_ROWS_AT_ONCE = 64
"""32 MB of products at a time."""
_CLOSE = 1e-5
"""Between devices computed frequencies differ in their last bits; a real change is larger."""

_digests: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, bytes]]] = weakref.WeakKeyDictionary()


def weights_digest(model: Any) -> str:
    """BLAKE3 over name, type, shape and bytes of every parameter and buffer, sorted by name.

    Where they are does not matter. Raises `Unsupported` by name for tensors whose bytes cannot be
    told: of other classes (their scales may stand beside them), or not in memory."""
    known = _digests.setdefault(model, {})
    hasher = blake3()
    seen: dict[str, tuple[Any, bytes]] = {}
    for name, tensor in sorted(_weights(model)):
        _check(name, tensor)
        if tensor.device.type == "cpu":
            digest = _digest(tensor)
        else:
            state, own = _state(tensor), known.get(name)
            digest = own[1] if own is not None and own[0] == state else _digest(tensor)
            seen[name] = (state, digest)
        head = f"{len(name)}:{name}:{tensor.dtype}:{tuple(tensor.shape)}:"
        hasher.update(head.encode() + digest)
    known.clear()
    known.update(seen)
    return f"blake3:{hasher.hexdigest()}"


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    computed = _frequencies(model)
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name not in computed:
            yield name, buffer


def _frequencies(model: Any) -> set[str]:
    """RoPE frequencies that are what the configuration makes of them: the identity has that, and
    each device computes them a little differently."""
    found = set()
    for place, module in model.named_modules():
        own = {n: b for n, b in module.named_buffers(recurse=False) if n.endswith("inv_freq")}
        config = getattr(module, "config", None)
        if not own or config is None or "config" not in inspect.signature(type(module)).parameters:
            continue
        with torch.device("cpu"):
            made = dict(type(module)(config=config).named_buffers(recurse=False))
        rewritten = {"inv_freq"} if getattr(module, "rope_type", None) == "longrope" else set()
        for name, buffer in own.items():
            fresh = made.get(name)
            if name in rewritten or (  # by each forward, from the others
                fresh is not None
                and fresh.dtype == buffer.dtype
                and fresh.shape == buffer.shape
                and torch.allclose(buffer.detach().cpu(), fresh, rtol=_CLOSE, atol=0.0)
            ):
                found.add(f"{place}.{name}" if place else name)
    return found


def _check(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise Unsupported(
            f"weights of class {type(tensor).__name__} are not handled ({name})",
            "load the model without this quantization or sharding",
        )
    if tensor.device.type == "meta":
        raise Unsupported(f"the weights {name} are not in memory", "load the model without offload")


def _state(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal as long as the tensor is."""
    words = _words(tensor)
    factors = _factors(words.device)
    whole = len(words) // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW)
    sums = [(_folded(part) * factors).sum(-1) for part in torch.split(rows, _ROWS_AT_ONCE)]
    rest = (_folded(words[whole:]) * factors[: len(words) - whole]).sum()[None]
    tail = _bytes(tensor)[len(words) * 8 :]
    where = (tensor.data_ptr(), version_of(tensor), tensor.device, tensor.dtype, tensor.shape)
    return (*where, torch.cat([*sums, rest]).cpu().numpy().tobytes(), tail.cpu().numpy().tobytes())


def _folded(words: torch.Tensor) -> torch.Tensor:
    """Factors are odd: without this, flips of an even number of top bits would cancel."""
    return words ^ (words >> 32)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place, as far as torch counts; -1 where it does not."""
    return -1 if tensor.is_inference() else int(tensor._version)


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern: a value that moved within a row changes the sum."""
    golden = -0x61C8864680B583EB  # 2^64 / phi; int64 wraps around
    with torch.inference_mode(False):
        return (torch.arange(1, _ROW + 1, device=device) * golden) | 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    flat = _bytes(tensor)
    return flat[: len(flat) // 8 * 8].view(torch.int64)


def _digest(tensor: torch.Tensor) -> bytes:
    hasher = blake3(max_threads=blake3.AUTO)
    data = _bytes(tensor)
    for start in range(0, len(data), _CHUNK):
        hasher.update(data[start : start + _CHUNK].cpu().numpy().data.cast("B"))
    return hasher.digest()
