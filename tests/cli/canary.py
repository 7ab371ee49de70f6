"""Files that run code in whoever loads them without care: each makes the canary sing."""

from __future__ import annotations

import io
import marshal
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import numpy as np
import torch
import yaml

from kvsnap.formats.container import Tensor, pack, parse


class Canary:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def _torch_zip(path: Path) -> bytes:
    out = io.BytesIO()
    torch.save({"weight": Canary(path)}, out)
    return out.getvalue()


def _npy(path: Path) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array([Canary(path)], dtype=object), allow_pickle=True)
    return out.getvalue()


FORMS: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda path: pickle.dumps(Canary(path)),
    "text pickle": lambda path: pickle.dumps(Canary(path), protocol=0),
    "torch zip": _torch_zip,
    "npy of objects": _npy,
    "yaml": lambda path: f"!!python/object/apply:builtins.open ['{path}', 'w']\n".encode(),
    "marshal": lambda path: marshal.dumps(compile(f"open({str(path)!r}, 'w')", "c", "exec")),
}
"""What stands in a file → the bytes of one that makes the file `path` when it is loaded carelessly."""

CARELESS: dict[str, Callable[[bytes], object]] = {
    "pickle": pickle.loads,
    "text pickle": pickle.loads,
    "torch zip": lambda data: torch.load(io.BytesIO(data), weights_only=False),
    "npy of objects": lambda data: np.load(io.BytesIO(data), allow_pickle=True),
    "yaml": yaml.unsafe_load,
    "marshal": lambda data: FunctionType(marshal.loads(data), {})(),
}

INSIDE = ("words", "rows")
"""What of a file of ours holds such bytes, in files that are right by their own digest."""
_WORDS = ("identity", "notes", "creator", "model")


def with_inside(what: str, data: bytes, path: Path) -> bytes:
    """A file of ours with such bytes inside: in the JSON and the words of its header, or as its tensors."""
    container = parse(memoryview(data))
    metadata, tensors = dict(container.metadata), container.tensors
    if what == "words":
        metadata |= dict.fromkeys(metadata.keys() & _WORDS, FORMS["yaml"](path).decode())
    else:
        raw = np.frombuffer(FORMS["pickle"](path), np.uint8)
        tensors = dict.fromkeys(tensors, Tensor("U8", raw.shape, raw))
    return b"".join(map(bytes, pack(metadata, list(tensors.items())).buffers))
