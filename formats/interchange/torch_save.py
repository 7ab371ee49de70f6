"""The file that torch.save writes for tuples, dicts and tensors, without torch.

    FOLDER/data.pkl             pickle of protocol 2, see torch_tensors.py
    FOLDER/.format_version      "1"
    FOLDER/.storage_alignment   "64"
    FOLDER/byteorder            "little"
    FOLDER/data/N               the bytes of tensor N, in the order of the pickle
    FOLDER/version              "3\\n"

torch 2.13 ends with one more entry, `.data/serialization_id`: 20 digits of a hash of the C++ library over
names and 20 of the checksums. No reader asks for it, and it is left out. The rest is torch's own bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvsnap.formats.interchange.torch_tensors import FORMAT_VERSION, STORAGES
from kvsnap.formats.interchange.torch_zip import ALIGNMENT, write_entries
from kvsnap.formats.layout import Array

_STORAGE_NAMES = {kind: name.replace(".", " ") for name, (kind, _) in STORAGES.items()}


@dataclass(frozen=True)
class Tensor:
    """`array`: contiguous, of unsigned integers as wide as an element of `type`."""

    type: str
    array: Array


Value: TypeAlias = Tensor | tuple["Value", ...] | Mapping[str, "Value"]


def save(value: Value, folder: str) -> bytes:
    """One file; equal values give equal bytes. Each tensor has a storage of its own."""
    pickler = _Pickler()
    pickler.value(value)
    entries: list[tuple[str, bytes | memoryview]] = [
        ("data.pkl", bytes(pickler.out) + b"."),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode("ascii")),
        ("byteorder", b"little"),
        *((f"data/{n}", _bytes(tensor)) for n, tensor in enumerate(pickler.tensors)),
        ("version", f"{FORMAT_VERSION}\n".encode("ascii")),
    ]
    return write_entries([(f"{folder}/{name}", data) for name, data in entries])


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.array.reshape(-1).view(np.uint8).data


class _Pickler:
    """Writes what Python's pickler writes, down to which objects it remembers."""

    def __init__(self) -> None:
        self.out = bytearray(b"\x80\x02")
        self.tensors: list[Tensor] = []
        self._remembered = 0
        self._known: dict[str, int] = {}

    def value(self, value: Value) -> None:
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, tuple):
            self._begin(len(value))
            for item in value:
                self.value(item)
            self._end(len(value))
        else:
            self.out += b"}"
            self._remember()
            self.out += b"("
            for key, item in value.items():
                self._text(key)
                self.value(item)
            self.out += b"u"

    def _tensor(self, tensor: Tensor) -> None:
        number = len(self.tensors)
        self.tensors.append(tensor)
        shape = tensor.array.shape
        strides = tuple(step // tensor.array.itemsize for step in tensor.array.strides)
        self._name("torch._utils _rebuild_tensor_v2")
        self.out += b"(("
        self._text("storage")
        self._name(_STORAGE_NAMES[tensor.type])
        self._text(str(number), again=False)
        self._text("cpu")
        self._number(tensor.array.size)
        self.out += b"t"
        self._remember()
        self.out += b"Q"
        self._number(0)
        self._numbers(shape)
        self._numbers(strides)
        self.out += b"\x89"
        self._name("collections OrderedDict")
        self.out += b")R"
        self._remember()
        self.out += b"t"
        self._remember()
        self.out += b"R"
        self._remember()

    def _numbers(self, numbers: tuple[int, ...]) -> None:
        self._begin(len(numbers))
        for number in numbers:
            self._number(number)
        self._end(len(numbers))

    def _begin(self, items: int) -> None:
        if items > 3:
            self.out += b"("

    def _end(self, items: int) -> None:
        """A tuple of what was written last; the short ones have operations of their own."""
        self.out += {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(items, b"t")
        if items:
            self._remember()

    def _number(self, number: int) -> None:
        if number < 1 << 8:
            self.out += struct.pack("<cB", b"K", number)
        elif number < 1 << 16:
            self.out += struct.pack("<cH", b"M", number)
        else:  # a zip's entry has less than 4 GB, so no number has more than 31 bits
            self.out += struct.pack("<ci", b"J", number)

    def _name(self, name: str) -> None:
        if not self._recall(name):
            self.out += b"c" + name.replace(" ", "\n").encode("ascii") + b"\n"
            self._remember(name)

    def _text(self, text: str, *, again: bool = True) -> None:
        if not again or not self._recall(text):
            raw = text.encode("utf-8")
            self.out += struct.pack("<cI", b"X", len(raw)) + raw
            self._remember(text if again else None)

    def _recall(self, known: str) -> bool:
        number = self._known.get(known)
        if number is not None:
            short = number < 1 << 8
            self.out += struct.pack("<cB" if short else "<cI", b"h" if short else b"j", number)
        return number is not None

    def _remember(self, known: str | None = None) -> None:
        if known is not None:
            self._known[known] = self._remembered
        if self._remembered < 1 << 8:
            self.out += struct.pack("<cB", b"q", self._remembered)
        else:
            self.out += struct.pack("<cI", b"r", self._remembered)
        self._remembered += 1
