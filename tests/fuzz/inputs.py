"""An input as readers take it: a buffer, a file."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsnap.formats.errors import KvsnapError


def as_buffer(data: bytes) -> memoryview:
    """Writable, as the buffers are that a store reads files into."""
    return memoryview(bytearray(data))


def as_file(data: bytes, name: str = "input.safetensors") -> Path:
    """The same file for every input."""
    path = folder() / name
    path.write_bytes(data)
    return path


def folder() -> Path:
    return Path(_folder().name)


def passes(check: Callable[[], Any]) -> bool:
    """Whether nothing is refused."""
    try:
        check()
    except KvsnapError:
        return False
    return True


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory)
