"""The public names: sorted, importable, documented."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.util import find_spec

import kvsnap

# A LlamaCache is one of llama-cpp-python's caches, which is an extra.
NAMES = [name for name in kvsnap.__all__ if name != "LlamaCache" or find_spec("llama_cpp")]


def test_all_is_sorted_and_importable() -> None:
    assert sorted(kvsnap.__all__, key=str.swapcase) == kvsnap.__all__ or (
        sorted(kvsnap.__all__) == kvsnap.__all__
    )
    for name in NAMES:
        assert getattr(kvsnap, name) is not None
    assert set(kvsnap.__all__) <= set(dir(kvsnap))


def test_public_names_are_documented() -> None:
    for name in NAMES:
        assert inspect.getdoc(getattr(kvsnap, name)), name


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(kvsnap, "no_such_name")


def test_an_import_loads_neither_torch_nor_an_engine() -> None:
    code = "import kvsnap, sys; print({'torch', 'llama_cpp', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
