"""What torch.save's pickle says of tensors, read without torch.

    persistent id             ("storage", torch.{Type}Storage, "N", location, elements): bytes of data/N
    _rebuild_tensor_v2        (storage, offset, size, stride, requires_grad, hooks); all in elements;
                              and metadata, where a tensor is a lazy conjugate or negative
    _rebuild_parameter        (tensor, requires_grad, hooks)

torch 2.13, torch/_tensor.py (`_reduce_ex_internal`) and torch/serialization.py (`_save`). Strides are kept:
transformers 4.46 saves K and V as [batch, tokens, heads, head_dim] in memory, seen as [batch, heads, ...].
A storage is saved whole, also for a tensor that shows a part of it.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from kvsnap.formats.errors import Damaged, Unsupported
from kvsnap.formats.interchange.pickle_reader import Known, Name, read_pickle
from kvsnap.formats.interchange.torch_zip import read_entries
from kvsnap.formats.layout import Array

STORAGES = {
    "torch.BFloat16Storage": ("bf16", 2),
    "torch.HalfStorage": ("f16", 2),
    "torch.FloatStorage": ("f32", 4),
    "torch.DoubleStorage": ("f64", 8),
    "torch.LongStorage": ("i64", 8),
    "torch.IntStorage": ("i32", 4),
    "torch.ShortStorage": ("i16", 2),
    "torch.CharStorage": ("i8", 1),
    "torch.ByteStorage": ("u8", 1),
    "torch.BoolStorage": ("bool", 1),
}
"""Name → type of the elements and their bytes."""
DTYPES = (
    "bfloat16", "float16", "float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
CACHE = "transformers.cache_utils.DynamicCache"
LAYER = "transformers.cache_utils.DynamicLayer"
FORMAT_VERSION = "3"
"""`kProducedFileFormatVersion` of torch.save since 1.6."""
_MAX_DIMENSIONS = 8


@dataclass(frozen=True)
class Storage:
    type: str
    item: int
    data: memoryview

    def __len__(self) -> int:
        return self.data.nbytes // self.item


@dataclass(frozen=True)
class TorchTensor:
    """Shape and strides as numbers of elements; within the storage, and not more than it has."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def type(self) -> str:
        return self.storage.type

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.storage.item

    def array(self) -> Array:
        """The elements as unsigned integers of their width; a view with the tensor's strides.
        A tensor of none has no length in any axis."""
        item = self.storage.item
        flat = np.frombuffer(self.storage.data, f"<u{item}")
        if 0 in self.shape:  # numpy refuses [0, 2**62]
            return np.empty((0,) * len(self.shape), flat.dtype)
        return np.lib.stride_tricks.as_strided(
            flat[self.offset :],
            self.shape,
            tuple(stride * item for stride in self.strides),
            writeable=False,
        )


def read_torch(buffer: memoryview) -> object:
    """What torch.save was given: tuples, lists, dicts, `TorchTensor`s and `Stub`s of caches."""
    entries = _in_one_folder(read_entries(buffer))
    if "data.pkl" not in entries or "constants.pkl" in entries:
        raise Unsupported("the zip holds no file of torch.save")
    order = bytes(entries.get("byteorder", b"little"))  # older versions did not say
    if order != b"little":
        raise Unsupported(
            "the file was saved on a machine of another byte order",
            "save it on a little-endian one",
        )
    version = bytes(entries.get("version", b"")).decode("ascii", "replace").strip()
    if version != FORMAT_VERSION:
        raise Unsupported(
            f"torch's file format {reprlib.repr(version)} is not known (known: {FORMAT_VERSION})"
        )
    return read_pickle(bytes(entries["data.pkl"]), _known(entries))


def _in_one_folder(entries: Mapping[str, memoryview]) -> dict[str, memoryview]:
    folders = {name.partition("/")[0] for name in entries}
    if len(folders) != 1 or any("/" not in name for name in entries):
        raise Unsupported("the zip holds no file of torch.save: its entries are not in one folder")
    return {name.partition("/")[2]: data for name, data in entries.items()}


def _known(entries: Mapping[str, memoryview]) -> Known:
    def storage(told: object) -> Storage:
        return _storage(told, entries)

    return Known(
        makers={
            "torch._utils._rebuild_tensor_v2": _tensor,
            "torch._utils._rebuild_parameter": _parameter,
            "collections.OrderedDict": _ordered,
            "__builtin__.set": _set,
            "builtins.set": _set,
            "torch.device": _device,
        },
        classes={CACHE, LAYER},
        values={*STORAGES, *(f"torch.{name}" for name in DTYPES)},
        persistent=storage,
    )


def _storage(told: object, entries: Mapping[str, memoryview]) -> Storage:
    if not isinstance(told, tuple) or len(told) != 5:
        raise Damaged("the pickle's persistent id is none of torch.save")
    kind, name, key, _, elements = told
    if kind != "storage" or not isinstance(name, Name) or name.text not in STORAGES:
        raise Damaged("the pickle's persistent id is none of torch.save")
    data = entries.get(f"data/{key}") if isinstance(key, str) else None
    if data is None:
        raise Damaged(f"the file lacks the storage {reprlib.repr(key)} that its pickle names")
    dtype, item = STORAGES[name.text]
    if not _is_count(elements) or elements * item != data.nbytes:
        raise Damaged(
            f"storage {reprlib.repr(key)} has {data.nbytes} bytes, and its pickle says others"
        )
    return Storage(dtype, item, data)


def _tensor(*told: object) -> TorchTensor:
    if len(told) == 7:  # conj and neg: the values are not those of the storage
        raise Unsupported("a tensor with metadata", "save a copy of it: tensor.clone()")
    if len(told) != 6:
        raise Damaged("a tensor is described otherwise than torch.save does")
    storage, offset, shape, strides = told[:4]
    if not isinstance(storage, Storage) or not _is_count(offset):
        raise Damaged("a tensor is described otherwise than torch.save does")
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise Damaged("a tensor has an impossible shape")
    if 0 not in shape:
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if last >= len(storage):
            raise Damaged(
                f"a tensor of shape {list(shape)} goes beyond its {len(storage)} elements"
            )
        if math.prod(shape) > len(storage):
            raise Unsupported(f"a tensor of shape {list(shape)} shows elements more than once")
    # A step that is never made may be any number, and numpy multiplies it.
    steps = tuple(step if n > 1 else 0 for n, step in zip(shape, strides, strict=True))
    return TorchTensor(storage, offset, shape, steps)


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _are_counts(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and len(value) <= _MAX_DIMENSIONS and all(map(_is_count, value))


def _parameter(tensor: object, _requires_grad: object, _hooks: object) -> TorchTensor:
    if not isinstance(tensor, TorchTensor):
        raise Damaged("the pickle makes a parameter of what is no tensor")
    return tensor


def _ordered() -> dict[str, object]:
    return {}


def _set(items: object) -> set[str]:
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise Unsupported("the pickle has a set of something else than text")
    return set(items)


def _device(*_told: object) -> Name:
    return Name("torch.device")
