"""The code that computes a live model's rows, where it is not that of the known packages.

Classes of one's own, and those that came with the weights, make another identity. What a program puts
onto single modules, hooks and patched methods, is not seen: most of it only counts or measures, and what
it does nobody can tell. docs/engines.md says so.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from types import CodeType
from typing import Any

from blake3 import blake3

_KNOWN = ("torch", "transformers", "accelerate", "peft", "kvsnap")
"""Packages whose code is what its names say; that of others may compute anything."""


def own_code(model: Any) -> tuple[tuple[str, str], ...]:
    """Names and digests of the classes of modules, and of what runs as their forward, that are the
    user's own or came with the weights."""
    own: dict[str, dict[str, str]] = {}
    for kind in {type(module) for module in model.modules()}:
        name = f"{kind.__module__}.{kind.__qualname__}"
        for code in (kind, *(f for f in _chain(kind.forward) if not _is_known(f))):
            if not _is_known(code):
                own.setdefault(name, {})[code.__qualname__] = _digest(code)
    return (("code", json.dumps(own, sort_keys=True)),) if own else ()


def _chain(function: Any) -> Iterator[Any]:
    """A function and all that it wraps."""
    while function is not None:
        if isinstance(function, functools.partial):
            yield from _chain(function.func)
        else:
            function = getattr(function, "__func__", function)
            yield function
        function = getattr(function, "__wrapped__", None)


def _home(code: Any) -> str:
    """The module it was written in; `functools.wraps` copies only what it says of itself."""
    told = getattr(code, "__globals__", {}).get("__name__") or getattr(code, "__module__", None)
    return str(told or type(code).__module__)


def _is_known(code: Any) -> bool:
    return _home(code).partition(".")[0] in _KNOWN


@functools.lru_cache(maxsize=1024)
def _digest(code: Any) -> str:
    """Of the source, so that an edit shows; where there is none, of what was compiled."""
    try:
        source = inspect.getsource(code).encode()
    except (OSError, TypeError):  # typed in by hand, or made by a program
        functions = vars(code).values() if isinstance(code, type) else [code]
        compiled = (getattr(function, "__code__", None) for function in functions)
        source = b"".join(_compiled(one) for one in compiled if one is not None)
    return blake3(source).hexdigest(length=8)


def _compiled(code: CodeType) -> bytes:
    constants = [
        _compiled(one) if isinstance(one, CodeType) else repr(one).encode()
        for one in code.co_consts
    ]
    return b"".join([code.co_code, repr(code.co_names).encode(), *constants])
