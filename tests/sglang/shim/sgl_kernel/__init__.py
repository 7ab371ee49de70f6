"""Stands in for SGLang's compiled kernels, of which there is no wheel for CPUs.

One function is real, in torch: the one that SGLang's CPU engine calls with torch's own attention. Any
other name can be imported, and raises when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    stops: torch.Tensor,
    locations: torch.Tensor,
    *rest: Any,
) -> None:
    """Write each request's new cache locations, which stand one after another, into its row."""
    taken = 0
    for request, start, stop in zip(
        requests.tolist(), starts.tolist(), stops.tolist(), strict=False
    ):
        new = locations[taken : taken + stop - start]
        req_to_token[request, start:stop] = new.to(req_to_token.dtype)
        taken += stop - start


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the test shim")

    return missing
