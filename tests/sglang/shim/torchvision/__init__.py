"""Stands in for torchvision, which SGLang and transformers import and no text model uses.

Every submodule and every name in it can be imported; nothing can be called.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []


class _Names(type):
    """Members of an enumeration are asked for by name, or all of them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __iter__(cls) -> Any:
        return iter(())


class Nothing(metaclass=_Names):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("torchvision is not in the test shim")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        inside = name.startswith(f"{__name__}.")
        return ModuleSpec(name, self, is_package=True) if inside else None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = __getattr__  # type: ignore[method-assign]


sys.meta_path.append(_Submodules())
