"""ggml's tensor types, as far as K and V can have them (ggml.h, `enum ggml_type`)."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.errors import Unsupported


@dataclass(frozen=True)
class GgmlType:
    """A row of n elements takes n / `block` * `bytes` bytes. `dtype` only for plain elements."""

    number: int
    name: str
    block: int
    bytes: int
    dtype: str = ""

    @property
    def quantized(self) -> bool:
        return self.block > 1

    def row_bytes(self, elements: int) -> int:
        if elements % self.block:
            raise Unsupported(f"a row of {elements} elements is no multiple of {self.name} blocks")
        return elements // self.block * self.bytes


GGML_TYPES = {
    t.number: t
    for t in (
        GgmlType(0, "f32", 1, 4, "F32"),
        GgmlType(1, "f16", 1, 2, "F16"),
        GgmlType(30, "bf16", 1, 2, "BF16"),
        GgmlType(2, "q4_0", 32, 18),
        GgmlType(3, "q4_1", 32, 20),
        GgmlType(6, "q5_0", 32, 22),
        GgmlType(7, "q5_1", 32, 24),
        GgmlType(8, "q8_0", 32, 34),
        GgmlType(20, "iq4_nl", 32, 18),
    )
}


def ggml_type(number: int) -> GgmlType:
    """The type of a number; `Unsupported` for one that K and V are not known to have."""
    try:
        return GGML_TYPES[number]
    except KeyError:
        raise Unsupported(f"K or V of ggml type {number} is not known to kvsnap") from None


def ggml_type_named(name: str) -> GgmlType:
    for found in GGML_TYPES.values():
        if found.name == name.lower():
            return found
    names = ", ".join(t.name for t in GGML_TYPES.values())
    raise Unsupported(f"K or V of type {name!r} is not known to kvsnap", f"known types: {names}")
