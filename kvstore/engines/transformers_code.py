"""The code that computes a live model's rows, where it is not that of the known packages.

Classes of one's own, and those that came with the weights, make another identity. What was put onto
single modules is refused: a hook or a method says nothing of what it does, and goes as it came.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from types import CodeType
from typing import Any

import torch
from blake3 import blake3

from kvsnap.formats.errors import Unsupported

_KNOWN = ("torch", "transformers", "accelerate", "peft", "kvsnap")
"""Packages whose code is what its names say; that of others may compute anything."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def check_code(model: Any) -> None:
    """Raise `Unsupported` by name for forward hooks and methods that a program put onto modules."""
    for hooks in _HOOKS:
        for hook in getattr(torch.nn.modules.module, f"_global{hooks}").values():
            _refuse(hook, "every module", "hook")
    for name, module in model.named_modules():
        for hook in (h for hooks in _HOOKS for h in getattr(module, hooks).values()):
            _refuse(hook, name or "the model", "hook")
        if "forward" in vars(module):
            _refuse(vars(module)["forward"], name or "the model", "forward")


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


def _refuse(function: Any, place: str, what: str) -> None:
    for code in _chain(function):
        if not _is_known(code):
            name = getattr(code, "__qualname__", type(code).__qualname__)
            raise Unsupported(
                f"{place} has a {what} of its own, {_home(code)}.{name}, which may change what is"
                " computed",
                f"take the {what} off while kvsnap loads and saves, and run the model without it",
            )


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
