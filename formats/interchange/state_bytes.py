"""Little-endian fields and areas of llama.cpp's states: read with suspicion, written to the byte."""

from __future__ import annotations

import struct

from kvsnap.formats.errors import Damaged
from kvsnap.formats.layout import Array


class Reader:
    """Bounded reads over a buffer: every count is compared with the bytes left before it is used."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer, 0

    def take(self, fields: struct.Struct) -> tuple[int, ...]:
        return fields.unpack(self.bytes(fields.size))

    def bytes(self, size: int) -> memoryview:
        if size > len(self.buffer) - self.at:
            raise Damaged(f"the state is cut: {len(self.buffer)} bytes are not all of it")
        self.at += size
        return self.buffer[self.at - size : self.at]


class Writer:
    def __init__(self, buffer: Array) -> None:
        self.buffer, self.at = buffer, 0

    def put(self, fields: struct.Struct, *values: int) -> None:
        fields.pack_into(self.buffer.data, self.at, *values)
        self.at += fields.size

    def area(self, size: int) -> Array:
        self.at += size
        return self.buffer[self.at - size : self.at]

    def finish(self) -> Array:
        if self.at != len(self.buffer):
            raise AssertionError(f"assembled {self.at} of {len(self.buffer)} bytes")
        return self.buffer
