"""Faults to put into a store: bytes that change, and an operating system that says no.

Patched functions are those of the `os` module, so whatever calls them meets the fault; use them
around the call under test only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

WRITES = ("write", "writev", "pwrite", "pwritev")
READS = ("read", "readv", "pread", "preadv")


def flip(path: Path, offset: int, bits: int = 0x01) -> None:
    """Change one byte in place; a negative offset counts from the end. Times stay as they are."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[offset] ^= bits
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path, size: int) -> None:
    """Shorten a file to `size` bytes, or lengthen it with zeros."""
    os.truncate(path, size)


@contextlib.contextmanager
def failing(
    *functions: str,
    error: int = errno.EIO,
    after: int = 0,
    result: Callable[[], Any] | None = None,
) -> Iterator[list[str]]:
    """Let the named functions of `os` fail from call number `after` on (counted together).

    They raise OSError `error`, or return what `result` gives. Yields the list of calls that
    failed, so that a test can tell a fault that was met from one that was not.
    """
    met: list[str] = []
    calls = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls <= after:
                return real(*args, **kwargs)
            met.append(name)
            if result is not None:
                return result()
            raise OSError(error, os.strerror(error))

        return call

    with contextlib.ExitStack() as stack:
        for name in functions:
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, wrap(name, getattr(os, name))))
        yield met
