"""The calls of `os` that a piece of code makes on a folder: listed, and one of them failing.

Functions of the `os` module are patched, so whatever calls them is seen, pathlib too; what SQLite
does by itself is not. Only calls on paths below the folder, or on files opened there, count.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

CHANGING = (
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "remove",
    "rmdir",
    "link",
    "symlink",
    "truncate",
)
ASKING = ("stat", "lstat", "access", "scandir", "listdir", "readlink", "chmod", "utime", "statvfs")
ON_HANDLES = ("read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev")
ENDING = ("fstat", "fsync", "fdatasync", "ftruncate", "fchmod", "close")
EVERY = ("open", *CHANGING, *ASKING, *ON_HANDLES, *ENDING)


@dataclass(frozen=True)
class Fault:
    """Call number `number` fails with `error`; with `lasting`, so does every later one.

    With `only`, calls of other functions are neither counted nor do they fail.
    """

    number: int
    error: int
    lasting: bool = False
    only: tuple[str, ...] = EVERY

    def hits(self, count: int) -> bool:
        return count == self.number or (self.lasting and count > self.number)


@dataclass
class Calls:
    """What was called so far, as "function path"; `failed` are those that the fault was put into."""

    top: str
    fault: Fault | None
    made: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    handles: dict[int, str] = field(default_factory=dict)
    count: int = 0

    def path_of(self, args: tuple[Any, ...]) -> str | None:
        """The path below the folder that a call is about; None for other people's calls."""
        if not args:
            return None
        if isinstance(args[0], int):
            return self.handles.get(args[0])
        path = os.path.abspath(os.fsdecode(args[0]))  # noqa: PTH100 - pathlib would be seen here
        return path if path == self.top or path.startswith(self.top + os.sep) else None

    def must_fail(self, name: str, path: str) -> bool:
        said = f"{name} {path[len(self.top) + 1 :] or '.'}"
        self.made.append(said)
        if self.fault is None or name not in self.fault.only:
            return False
        self.count += 1
        if not self.fault.hits(self.count - 1):
            return False
        self.failed.append(said)
        return True


@contextlib.contextmanager
def watching(top: Path, fault: Fault | None = None) -> Iterator[Calls]:
    """Note every call on what is below `top`, and let those fail that `fault` says.

    `access` then says no, as it never raises; `close` closes and then raises, as Linux does.
    """
    calls = Calls(str(top), fault)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = calls.path_of(args)
            if path is None:
                return real(*args, **kwargs)
            fails = calls.must_fail(name, path)
            if name == "close":
                calls.handles.pop(args[0], None)
                real(*args)
            if fails and name == "access":
                return False
            if fails and fault is not None:
                raise OSError(fault.error, os.strerror(fault.error), path)
            if name == "close":
                return None
            result = real(*args, **kwargs)
            if name == "open":
                calls.handles[result] = path
            return result

        return call

    with contextlib.ExitStack() as stack:
        for name in EVERY:
            if hasattr(os, name):
                stack.enter_context(mock.patch.object(os, name, wrap(name, getattr(os, name))))
        yield calls
