"""Which parts the memory of a llama.cpp context has, and which groups of layers stand in them.

The API tells the kind of memory, not which layers are in which part: that is read from the state of a
context that holds a token. A sliding window whose cells are all kept (`swa_full`, llama-cpp-python's
default) is as good as full attention; its rows go into blocks, and the model can be cut anywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import llama_cpp
import numpy as np

from kvsnap.formats.errors import EngineError, Unsupported
from kvsnap.formats.interchange.ggml import GgmlType
from kvsnap.formats.interchange.llamacpp import LayerType, State, StateType, parse_state
from kvsnap.formats.interchange.llamacpp_memory import (
    Part,
    PartType,
    Recurrent,
    RecurrentType,
    parse_memory,
)
from kvsnap.formats.layout import Array, Group, Layout, Plane, PlaneRope

BYTE_POINTER = ctypes.POINTER(ctypes.c_uint8)


@dataclass(frozen=True)
class Memory:
    """Parts of the states in their order, and the groups of layers in each."""

    version: int
    parts: tuple[PartType, ...]
    groups: tuple[tuple[Group, ...], ...]
    window: int
    """Tokens, of the layers with a sliding window; 0 where there are none."""

    @property
    def layout(self) -> Layout:
        return Layout(groups=tuple(group for own in self.groups for group in own))

    @property
    def is_plain(self) -> bool:
        """One KV cache of full attention, as nearly all models have."""
        return not self.window and len(self.parts) == 1 and isinstance(self.parts[0], StateType)

    @property
    def recurrent(self) -> bool:
        return any(isinstance(part, RecurrentType) for part in self.parts)

    @property
    def beside_blocks(self) -> int:
        """The number of the first part that llama.cpp writes where it is asked for what a sequence has
        besides full attention (`PARTIAL_ONLY`)."""
        return 1 if len(self.parts) > 1 else 0

    def parse(self, buffer: memoryview, first: int = 0) -> list[Part]:
        return _parse(buffer, self.version, [_kind(part) for part in self.parts[first:]])


def kinds_of(llm: llama_cpp.Llama) -> list[type[State | Recurrent]]:
    """The parts that states of this context have, as far as the API tells."""
    model = llm.model
    kv: list[type[State | Recurrent]] = [State]
    if llama_cpp.llama_model_n_swa(model) > 0:
        kv.append(State)
    if llama_cpp.llama_model_is_recurrent(model):
        return [Recurrent]
    return [*kv, Recurrent] if llama_cpp.llama_model_is_hybrid(model) else kv


def probe(
    llm: llama_cpp.Llama, version: int, heads: int, ropes: Sequence[PlaneRope | None]
) -> Memory:
    """The memory of a context that is not plain; one token is evaluated in an empty context.

    `heads`: kv heads of a layer; `ropes`: of the K planes in full and in windowed attention.
    """
    kinds = kinds_of(llm)
    parts = _parse(_one_token_state(llm), version, kinds)
    window = int(llama_cpp.llama_model_n_swa(llm.model))
    in_blocks = bool(llm.context_params.swa_full) and Recurrent not in kinds
    groups = []
    for number, part in enumerate(parts):
        if isinstance(part, Recurrent):
            groups.append(_recurrent_groups(part.type))
        elif number == 0:
            groups.append(_kv_groups("full", part.type.layers, heads, ropes[0], None))
        else:
            span = None if in_blocks else window - 1
            groups.append(_kv_groups("window", part.type.layers, heads, ropes[1], span))
    return Memory(version, tuple(part.type for part in parts), tuple(groups), window)


def state_bytes(llm: llama_cpp.Llama, sequence: int, *, partial: bool = False) -> memoryview:
    """What llama.cpp writes of one sequence; `partial`: without the rows of full attention."""
    flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else 0
    size = llama_cpp.llama_state_seq_get_size_ext(llm.ctx, sequence, flags)
    buffer = np.empty(size, np.uint8)
    pointer = buffer.ctypes.data_as(BYTE_POINTER)
    written = llama_cpp.llama_state_seq_get_data_ext(llm.ctx, pointer, size, sequence, flags)
    if written != size:
        raise EngineError(f"llama.cpp gave {written} of {size} bytes of its state")
    return buffer.data.cast("B")


def _one_token_state(llm: llama_cpp.Llama) -> memoryview:
    memory = llama_cpp.llama_get_memory(llm.ctx)
    if llm.n_tokens and llama_cpp.llama_memory_seq_pos_max(memory, 0) >= 0:
        return state_bytes(llm, 0)
    llm.reset()  # else somebody cleared the memory behind the Llama's back
    llm.eval([max(0, llm.token_bos())])
    try:
        return state_bytes(llm, 0)
    finally:
        llama_cpp.llama_memory_clear(memory, True)
        llm.n_tokens = 0
        llm._requires_eval = True


def _parse(
    buffer: memoryview, version: int, kinds: Sequence[type[State | Recurrent]]
) -> list[Part]:
    if list(kinds) == [State]:
        return [parse_state(buffer, version)]
    return parse_memory(buffer, version, kinds)


def _kind(part: PartType) -> type[State | Recurrent]:
    return State if isinstance(part, StateType) else Recurrent


def _kv_groups(
    name: str,
    layers: Sequence[LayerType],
    heads: int,
    rope: PlaneRope | None,
    span: int | None,
) -> tuple[Group, ...]:
    """Runs of layers with equal rows."""
    runs = [(kind, len(list(run))) for kind, run in groupby(layers)]
    return tuple(
        Group(
            name=name if len(runs) == 1 else f"{name}{number}",
            layers=count,
            planes=(
                kv_plane("k", kind.k, kind.k_bytes, heads, rope),
                kv_plane("v", kind.v, kind.v_bytes, heads, None),
            ),
            span=span,
        )
        for number, (kind, count) in enumerate(runs)
    )


def kv_plane(
    name: str, kind: GgmlType, row_bytes: int, heads: int, rope: PlaneRope | None
) -> Plane:
    """`rope` is left out where it does not fit the heads that the row has."""
    if kind.quantized:
        return Plane(name=name, kind="rows", dtype="U8", row=(row_bytes,), source_type=kind.name)
    width = row_bytes // kind.bytes
    row = (heads, width // heads) if width % heads == 0 else (1, width)
    return Plane(
        name=name,
        kind="elements",
        dtype=kind.dtype,
        row=row,
        source_type=kind.name,
        rope=rope if rope is not None and rope.dims <= row[1] else None,
    )


def _recurrent_groups(kind: RecurrentType) -> tuple[Group, ...]:
    """Pages: what the layers keep has no token axis. Some keep an R only (short convolutions)."""
    sizes = {"r": {size for _, size in kind.r}, "s": {size for _, size in kind.s}}
    if any(len(own) != 1 for own in sizes.values()):
        raise Unsupported(
            "this model's recurrent layers differ in size", "kvsnap does not handle these yet"
        )
    planes = tuple(
        Plane(name=name, kind="pages", dtype="U8", row=(size,), source_type="state")
        for name, own in sizes.items()
        for size in own
        if size
    )
    return (Group(name="recurrent", layers=len(kind.r), planes=planes, span=0),)


def planes_of(
    groups: Sequence[Group], one: Sequence[Array], other: Sequence[Array]
) -> dict[str, Array]:
    """`GROUP.PLANE` → one view [layers, …] of the per-layer arrays of a part's two kinds of rows."""
    planes: dict[str, Array] = {}
    first = 0
    for group in groups:
        layers = slice(first, first + group.layers)
        for plane, arrays in zip(("k", "v"), (one, other), strict=True):
            name = plane if group.span != 0 else {"k": "r", "v": "s"}[plane]
            if any(own.name == name for own in group.planes):
                planes[f"{group.name}.{name}"] = _as_one(arrays[layers])
        first += group.layers
    return planes


def _as_one(layers: Sequence[Array]) -> Array:
    """Equal layers of one state buffer as one view: they are evenly spaced. Of layers that are copies (of
    cells that were put in order) a view would show memory of somebody else's."""
    first = layers[0]
    if len(layers) == 1:
        return first[None]
    places = [layer.ctypes.data for layer in layers]
    step = places[1] - places[0]
    if any(after - before != step for before, after in pairwise(places)) or first.flags.owndata:
        raise AssertionError("layers of several buffers are not one view")
    return np.lib.stride_tricks.as_strided(
        first, (len(layers), *first.shape), (step, *first.strides), writeable=first.flags.writeable
    )
