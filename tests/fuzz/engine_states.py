"""Valid states of llama.cpp to start from: a golden one, and small ones of every kind of memory."""

from __future__ import annotations

import functools
import struct

import numpy as np

from kvsnap.formats.interchange.ggml import GGML_TYPES
from kvsnap.formats.interchange.llamacpp import STATE_MAGIC, LayerType, StateType
from kvsnap.formats.interchange.llamacpp_memory import KvCells, RecurrentType, assemble_memory
from tests.fuzz.seeds import GOLDEN

_F16, _Q8 = GGML_TYPES[1], GGML_TYPES[8]
_PLAIN = LayerType(_F16, 8, _F16, 8)
_PACKED = LayerType(_Q8, 34, _Q8, 34)
_RECURRENT = RecurrentType(3, ((0, 12),), ((0, 20),))
KV = (
    StateType(3, False, (_PLAIN, _PLAIN)),
    StateType(3, True, (_PLAIN,) * 3),
    StateType(4, False, (_PACKED,), 3, 64, 64),
    StateType(4, True, (_PLAIN,)),
)


def _filled(kinds: list, cells: list[KvCells], position: int) -> bytes:
    made = assemble_memory(kinds, cells, position)
    for first, second in made.parts:
        for number, area in enumerate((*first, *second)):
            area[...] = number + 1
    return bytes(np.asarray(made.buffer).data)


@functools.cache
def of_attention(version: int) -> list[bytes]:
    """What `parse_state` reads: version 3 or 4, rows by token or by element, one stream or three."""
    found = [
        _filled([kind], [KvCells(n)], n) for kind in KV if kind.version == version for n in (5, 1)
    ]
    if version == 3:
        data = (GOLDEN / "foreign" / "llama_cpp_seq_v3_q4_0_vt0.ggsq").read_bytes()
        (tokens,) = struct.unpack_from("<I", data, 8)
        found.append(struct.pack("<Ii", STATE_MAGIC, 0) + data[12 + 4 * tokens :])
    return found


@functools.cache
def of_several(recurrent: bool) -> list[bytes]:
    """What `parse_memory` reads: attention and a sliding window, with recurrent layers or without."""
    kinds = [KV[0], KV[1], *([_RECURRENT] if recurrent else [])]
    return [_filled(kinds, [KvCells(6), KvCells(min(n, 6), 0)], 6) for n in (6, 2, 0)]
