"""Host memory for rows: plain, or page-locked where a GPU is to copy from it."""

from __future__ import annotations

import functools

import numpy as np

from kvsnap.formats.layout import Array


class HostMemory:
    """`pinned` asks for page-locked memory; without a GPU, or without torch, plain memory comes."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.wants_pinned = pinned

    @functools.cached_property
    def pinned(self) -> bool:
        """Whether page-locked memory is given. torch is imported only where it was asked for."""
        if not self.wants_pinned:
            return False
        try:
            import torch
        except ImportError:
            return False
        return torch.cuda.is_available()

    def cost(self, size: int) -> int:
        """Bytes that are really taken for `size`: torch rounds page-locked memory up to powers of
        two, and keeps it for the next of that size."""
        return 1 << (size - 1).bit_length() if self.pinned and size else size

    def take(self, size: int) -> Array:
        """Uninitialised bytes. Raises MemoryError where there are none."""
        if not self.pinned:
            return np.empty(size, np.uint8)
        import torch

        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:  # how torch says that page-locked memory has run out
            raise MemoryError(str(error)) from error
