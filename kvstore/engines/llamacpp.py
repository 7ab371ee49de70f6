"""llama.cpp through the caller's own `llama_cpp.Llama`.

Rows leave and enter as sequence states (formats/interchange/llamacpp.py). Only new rows are
exported: their range is copied to a scratch sequence (cell metadata only, no data moves), whose
state holds just those cells. `n_tokens` and `input_ids` are kept right, so that `generate`,
`create_completion` and `create_chat_completion` go on from the restored prefix.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import cast

import llama_cpp
import numpy as np

from kvsnap.engines.base import Landing, LossyRows
from kvsnap.engines.llamacpp_identity import (
    Facts,
    identity_of,
    layout_of,
    read_facts,
    refuse_media,
    stamps_of,
)
from kvsnap.engines.llamacpp_text import LlamaText
from kvsnap.formats.errors import BadTokenIds, DoesNotFit, EngineError, Unsupported, UsageError
from kvsnap.formats.identity import Identity
from kvsnap.formats.interchange.llamacpp import (
    LayerType,
    State,
    StateType,
    assemble,
    order_of,
    parse_state,
)
from kvsnap.formats.layout import Array, Layout, Rows
from kvsnap.formats.names import TokenIds, token_array

_LONGER = "make the context larger (--ctx) or the prompt shorter"
_BYTE_POINTER = ctypes.POINTER(ctypes.c_uint8)


class LlamaCpp(LlamaText):
    """Adapter over one `Llama`, sequence 0. Raises `Unsupported` by name for what it cannot do:

    sliding-window, recurrent, hybrid, M-RoPE and latent-attention models, media handlers,
    embedding contexts, and sequence state versions that this kvsnap does not know.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self.llm = llm
        self.facts: Facts = read_facts(llm)
        # The digest is that of a path: taken later it must still be the file that was loaded.
        self._stamps = stamps_of(llm)
        self._layout = layout_of(self.facts)
        self._type = StateType(
            version=self.facts.state_version,
            v_trans=self.facts.v_trans,
            layers=tuple(LayerType(*layer) for layer in self.facts.layers),
            n_stream=self.facts.n_stream,
            rotation_k=self.facts.rotation_k,
            rotation_v=self.facts.rotation_v,
        )
        # The last sequence id that llama.cpp has room for: no application counts up to there.
        self._scratch = llama_cpp.llama_max_parallel_sequences() - 1

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def capacity(self) -> int:
        # llama.cpp rounds a context up; the Llama's own array of ids has the length asked for.
        return min(int(self.llm.n_ctx()), len(self.llm.input_ids))

    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        if stamps_of(self.llm) != self._stamps:
            raise EngineError(
                "the model's file changed since the engine loaded it",
                "load the model again: its old weights have no name any more",
            )
        return identity_of(self.llm, self.facts, self._layout, block_size, file_digest)

    def token_ids(self) -> TokenIds:
        """Nothing where llama.cpp's own positions do not bear out `n_tokens`: somebody cleared the
        memory behind the Llama's back. A hole in the middle would not show."""
        refuse_media(self.llm)
        memory, tokens = llama_cpp.llama_get_memory(self.llm.ctx), self.llm.n_tokens
        first = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        last = llama_cpp.llama_memory_seq_pos_max(memory, 0)
        held = tokens if first == 0 and last >= tokens - 1 else 0
        return token_array(self.llm.input_ids[:held])

    @property
    def holder(self) -> tuple[str, str] | None:
        return getattr(self.llm, "_kvsnap_holder", None)

    @holder.setter
    def holder(self, value: tuple[str, str] | None) -> None:
        self.llm._kvsnap_holder = value  # adapters come and go; the context is what is shared

    @property
    def marks(self) -> tuple[LossyRows, ...]:
        return getattr(self.llm, "_kvsnap_marks", ())

    @marks.setter
    def marks(self, value: tuple[LossyRows, ...]) -> None:
        self.llm._kvsnap_marks = value

    def export(self, start: int, stop: int) -> Rows:
        if not 0 <= start < stop <= self.llm.n_tokens:
            raise UsageError(f"tokens {start}..{stop} of {self.llm.n_tokens} cannot be exported")
        if self._type.n_stream > 1:  # a partial copy between streams asserts: take all, then cut
            state = self._state(0)
            held = (state.positions >= start) & (state.positions < stop)
        else:
            memory = llama_cpp.llama_get_memory(self.llm.ctx)
            llama_cpp.llama_memory_seq_cp(memory, 0, self._scratch, start, stop)
            try:
                state = self._state(self._scratch)
            finally:
                llama_cpp.llama_memory_seq_rm(memory, self._scratch, -1, -1)
            held = np.ones(len(state.positions), bool)
        rotations = (state.type.rotation_k, state.type.rotation_v)
        if (state.type.layers, state.type.v_trans) != (self._type.layers, self._type.v_trans) or (
            # Versions before 4 do not record the rotation.
            state.type.version >= 4 and rotations != (self._type.rotation_k, self._type.rotation_v)
        ):
            raise Unsupported(
                "the engine's state has another layout than its model's metadata tells",
                "report this with the model's name; kvsnap stores nothing of it",
            )
        cells = np.flatnonzero(held)
        order = order_of(state.positions[cells], start, stop)
        rows = self._planes(state.k, state.v)
        if order is None and len(cells) == len(state.positions):
            return rows
        picked = cells if order is None else cells[order]
        return {name: array[:, picked] for name, array in rows.items()}

    def landing(self, stop: int, start: int = 0) -> Landing:
        if start == stop:
            return Landing(start, stop, self._layout.empty(0), None)
        sequence, first = (self._scratch, start) if self._can_append(start) else (0, 0)
        assembly = assemble(self._type, stop - first, sequence, first)
        rows = self._planes(assembly.k, assembly.v)
        missing = {name: array[:, start - first :] for name, array in rows.items()}
        return Landing(start, stop, missing, (assembly.buffer, rows))

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        start, stop = landing.start, len(token_ids)
        if stop > self.capacity:
            raise DoesNotFit(f"{stop} tokens do not fit a context of {self.capacity}", _LONGER)
        if not start <= stop <= landing.stop or start > self.llm.n_tokens:
            raise UsageError(f"rows of {start}..{landing.stop} cannot make {stop} tokens")
        if stop < landing.stop:  # damage shortened the prefix: the state is laid out anew
            shorter = self.landing(stop, start)
            for name, array in shorter.rows.items():
                array[...] = landing.rows[name][:, : stop - start]
            landing = shorter
        if start == stop:
            self.truncate(start)
            return
        buffer, rows = cast("tuple[Array, dict[str, Array]]", landing.buffer)
        append = self._can_append(start)
        if start and not append:
            for name, array in self.export(0, start).items():
                rows[name][:, :start] = array
        self.truncate(start if append else 0)
        self._set_state(buffer, start, stop, self._scratch if append else 0)
        self.llm.input_ids[:stop] = token_ids
        self.llm.n_tokens = stop
        self.llm._requires_eval = True  # a restored cache has no logits

    def _can_append(self, start: int) -> bool:
        """Whether only missing rows need to be loaded: into the scratch sequence, whose cells then
        become sequence 0's, too. Between streams such a copy asserts."""
        return start > 0 and self._type.n_stream == 1

    def _set_state(self, buffer: Array, start: int, stop: int, sequence: int) -> None:
        memory = llama_cpp.llama_get_memory(self.llm.ctx)
        if sequence == 0:
            llama_cpp.llama_memory_clear(memory, False)  # so that cells are taken from the first
        pointer = buffer.ctypes.data_as(_BYTE_POINTER)
        read = llama_cpp.llama_state_seq_set_data(self.llm.ctx, pointer, buffer.nbytes, sequence)
        if sequence != 0:
            if read == buffer.nbytes:
                llama_cpp.llama_memory_seq_cp(memory, sequence, 0, start, stop)
            llama_cpp.llama_memory_seq_rm(memory, sequence, -1, -1)
        if read != buffer.nbytes:
            raise EngineError(
                "llama.cpp did not take the restored state",
                "resume with a new context, and report this with the model's name",
            )

    def truncate(self, tokens: int) -> None:
        if tokens >= self.llm.n_tokens:
            return
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.llm.ctx), 0, tokens, -1)
        self.llm.n_tokens = tokens
        self.llm._requires_eval = True

    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        if self.llm.n_tokens + len(token_ids) > self.capacity:
            raise DoesNotFit(
                f"{self.llm.n_tokens + len(token_ids)} tokens do not fit a context of"
                f" {self.capacity}",
                _LONGER,
            )
        if len(token_ids) and int(token_ids.max()) >= self.llm.n_vocab():
            raise BadTokenIds(
                f"token id {int(token_ids.max())} is beyond the model's {self.llm.n_vocab()}",
                "give ids as this model's tokenizer gives them",
            )
        for start in range(0, len(token_ids), self.llm.n_batch):
            batch = token_ids[start : start + self.llm.n_batch].tolist()
            try:
                self.llm.eval(batch)
            except RuntimeError as error:
                raise EngineError(f"llama.cpp could not evaluate: {error}") from error
            self.evaluated += len(batch)
            step_done(len(batch))

    def _state(self, sequence: int) -> State:
        size = llama_cpp.llama_state_seq_get_size(self.llm.ctx, sequence)
        buffer = np.empty(size, np.uint8)
        pointer = buffer.ctypes.data_as(_BYTE_POINTER)
        written = llama_cpp.llama_state_seq_get_data(self.llm.ctx, pointer, size, sequence)
        if written != size:
            raise EngineError(f"llama.cpp gave {written} of {size} bytes of its state")
        return parse_state(buffer.data.cast("B"), self._type.version)

    def _planes(self, k: tuple[Array, ...], v: tuple[Array, ...]) -> dict[str, Array]:
        planes: dict[str, Array] = {}
        first = 0
        for group in self._layout.groups:
            layers = slice(first, first + group.layers)
            planes[f"{group.name}.k"] = _as_one(k[layers])
            planes[f"{group.name}.v"] = _as_one(v[layers])
            first += group.layers
        return planes


def _as_one(layers: tuple[Array, ...]) -> Array:
    """Equal layers of one state buffer as one view [layers, tokens, row]: they are evenly spaced."""
    if len(layers) == 1 or not layers:
        return layers[0][None]
    step = layers[1].ctypes.data - layers[0].ctypes.data
    first = layers[0]
    return np.lib.stride_tricks.as_strided(
        first, (len(layers), *first.shape), (step, *first.strides), writeable=first.flags.writeable
    )
