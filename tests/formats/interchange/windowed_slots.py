"""Slot files of a model with sliding windows, made by hand."""

from __future__ import annotations

import numpy as np

from kvsnap.formats.interchange.ggml import ggml_type
from kvsnap.formats.interchange.llama_server_slot import SlotFile, assemble_slot, parse_slot
from kvsnap.formats.interchange.llamacpp import LayerType, StateType
from kvsnap.formats.interchange.llamacpp_memory import KvCells, assemble_memory
from kvsnap.formats.names import TokenIds

F16 = ggml_type(1)
KIND = StateType(4, False, (LayerType(F16, 4, F16, 2),))


def slot_file(ids: TokenIds, first: int) -> bytearray:
    """Of one layer with full attention and one whose rows before `first` are left out; every element
    says its position."""
    tokens = len(ids)
    head = assemble_slot(ids, KIND).buffer[: 12 + 4 * (4 + tokens)]
    cells = [KvCells(tokens), KvCells(tokens - first, first)]
    memory = assemble_memory([KIND, KIND], cells, tokens)
    for (k, v), start in zip(memory.parts, (0, first), strict=True):
        for rows in (*k, *v):
            rows[...] = np.arange(start, tokens)[:, None]
    return bytearray(np.concatenate([head, memory.buffer[8:]]).tobytes())


def parsed(ids: TokenIds, window: int, lost: int = 0) -> SlotFile:
    first = max(len(ids) - window, min(lost, len(ids) - 1), 0)
    return parse_slot(memoryview(slot_file(ids, first)))
