"""llama.cpp through the caller's own `llama_cpp.Llama`.

Rows leave and enter as sequence states (formats/interchange/llamacpp.py, llamacpp_memory.py). Only new rows are
exported: their range is copied to a scratch sequence (cell metadata only, no data moves), whose
state holds just those cells. `n_tokens` and `input_ids` are kept right, so that `generate`,
`create_completion` and `create_chat_completion` go on from the restored prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

import llama_cpp
import numpy as np

from kvsnap.engines.base import Landing, LossyRows
from kvsnap.engines.llamacpp_identity import (
    Facts,
    identity_of,
    memory_of,
    read_facts,
    refuse_media,
    stamps_of,
)
from kvsnap.engines.llamacpp_memory import BYTE_POINTER, planes_of, state_bytes
from kvsnap.engines.llamacpp_text import LlamaText
from kvsnap.engines.llamacpp_window import guard_windows, is_sure, note_empty
from kvsnap.formats.errors import (
    BadTokenIds,
    Damaged,
    DoesNotFit,
    EngineError,
    Unsupported,
    UsageError,
)
from kvsnap.formats.identity import Identity
from kvsnap.formats.interchange.llamacpp import State, StateType, order_of
from kvsnap.formats.interchange.llamacpp_memory import (
    KvCells,
    Part,
    PartType,
    Recurrent,
    RecurrentType,
    assemble_memory,
)
from kvsnap.formats.layout import Array, Group, Layout, Rows
from kvsnap.formats.names import TokenIds, token_array

_LONGER = "make the context larger (--ctx) or the prompt shorter"


class LlamaCpp(LlamaText):
    """Adapter over one `Llama`, sequence 0. Raises `Unsupported` by name for what it cannot do:

    M-RoPE and latent-attention models, media handlers, embedding contexts, and sequence state
    versions that this kvsnap does not know. Recurrent and hybrid models, and sliding windows of
    which only the window is kept (`swa_full=False`), go on from state checkpoints only.
    """

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self.llm = llm
        self.facts: Facts = read_facts(llm)
        # The digest is that of a path: taken later it must still be the file that was loaded.
        self._stamps = stamps_of(llm)
        self.memory = memory_of(llm, self.facts)
        self._layout = self.memory.layout
        self._span = max((group.span or 0 for group in self._layout.groups), default=0)
        if self._span and not self.memory.recurrent:  # recurrent ones never go back
            guard_windows(llm, lambda llm, position: LlamaCpp(llm).has_window(position))
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
        last = llama_cpp.llama_memory_seq_pos_max(memory, 0)
        # With state besides blocks this is the window's first, or the state's one position.
        first = llama_cpp.llama_memory_seq_pos_min(memory, 0)
        latest = max(0, tokens - 1) if self.memory.recurrent else max(0, tokens - self._span)
        whole = 0 <= first <= latest if self._layout.needs_state else first == 0
        held = tokens if whole and last >= tokens - 1 and is_sure(self.llm) else 0
        return token_array(self.llm.input_ids[:held])

    def check_held(self) -> None:
        if self.llm.n_tokens and not is_sure(self.llm):
            raise UsageError(
                "this Llama was used before kvsnap saw it, with a window of which only the end is"
                " kept (swa_full=False): nobody knows whether its rows are right",
                "make the adapter before the Llama is used, or resume the session first",
            )

    @property
    def shared(self) -> object:
        return self.llm

    @property
    def holder(self) -> tuple[str, str | None] | None:
        return getattr(self.llm, "_kvsnap_holder", None)

    @holder.setter
    def holder(self, value: tuple[str, str | None] | None) -> None:
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
        # Of windowed layers llama.cpp writes the last window of a sequence only.
        step = self.memory.window if self._windows_in_blocks else stop - start
        pieces = [self._cells(first, min(first + step, stop)) for first in range(start, stop, step)]
        if len(pieces) == 1:
            return pieces[0]
        return {name: np.concatenate([p[name] for p in pieces], axis=1) for name in pieces[0]}

    def export_state(self) -> Rows:
        position = self.llm.n_tokens
        rows: dict[str, Array] = {}
        for part, groups in self._parts(0, partial=True):
            if isinstance(part, Recurrent):
                if part.position != position - 1:
                    raise EngineError(
                        f"the engine's recurrent state stands at {part.position + 1}, not {position}"
                    )
                rows |= planes_of(groups, part.r, part.s)
            elif groups and groups[0].span:
                first = max(0, position - groups[0].span)
                rows |= _picked(part, groups, first, position)
        return rows

    def reach(self, tokens: int) -> int:
        """Windowed rows before the end may be there or not: llama.cpp's memory is asked."""
        if not self._layout.needs_state or tokens == self.llm.n_tokens:
            return tokens
        can = tokens > 0 and not self.memory.recurrent and self.has_window(tokens)
        return tokens if can else 0

    def has_window(self, tokens: int) -> bool:
        """Whether the windowed rows are there that the token after so many sees."""
        try:
            for part, groups in self._shared(0, tokens, partial=True):
                if isinstance(part, State) and groups and groups[0].span:
                    _picked(part, groups, max(0, tokens - groups[0].span), tokens)
        except Damaged:
            return False
        return True

    def landing(self, stop: int, start: int = 0) -> Landing:
        if start == stop:
            return Landing(start, stop, self._layout.in_blocks.empty(0), None)
        sequence, first = (self._scratch, start) if self._can_append(start) else (0, 0)
        cells = []
        for groups in self.memory.groups:
            span = groups[0].span if groups else None
            if span != 0:
                low = first if span is None else max(0, stop - span)
                cells.append(KvCells(stop - low, low))
        assembly = assemble_memory(self.memory.parts, cells, stop, sequence)
        rows: dict[str, Array] = {}
        for groups, (one, other) in zip(self.memory.groups, assembly.parts, strict=True):
            rows |= planes_of(groups, one, other)
        missing = rows | {
            name: array[:, start - first :] for name, array in self._layout.of_blocks(rows).items()
        }
        return Landing(start, stop, missing, (assembly.buffer, rows))

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        start, stop = landing.start, len(token_ids)
        if stop > self.capacity:
            raise DoesNotFit(f"{stop} tokens do not fit a context of {self.capacity}", _LONGER)
        if not start <= stop <= landing.stop or start > self.llm.n_tokens:
            raise UsageError(f"rows of {start}..{landing.stop} cannot make {stop} tokens")
        if stop < landing.stop and self._layout.needs_state:
            raise UsageError(f"a state of {landing.stop} tokens cannot make {stop}")
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
        become sequence 0's, too. Between streams such a copy asserts. Cells that a window masks may
        be taken for others, so memories with one are loaded anew, as a whole."""
        return start > 0 and self._streams == 1 and self.memory.is_plain

    def _set_state(self, buffer: Array, start: int, stop: int, sequence: int) -> None:
        memory = llama_cpp.llama_get_memory(self.llm.ctx)
        if sequence == 0:
            llama_cpp.llama_memory_clear(memory, False)  # so that cells are taken from the first
            note_empty(self.llm)
        pointer = buffer.ctypes.data_as(BYTE_POINTER)
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
        if tokens >= self.llm.n_tokens and tokens > 0:
            return
        memory = llama_cpp.llama_get_memory(self.llm.ctx)
        if not llama_cpp.llama_memory_seq_rm(memory, 0, tokens, -1):
            raise EngineError(f"llama.cpp cannot go back to {tokens} tokens with this model")
        self.llm.n_tokens = tokens
        self.llm._requires_eval = True
        if tokens == 0:
            note_empty(self.llm)

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

    @property
    def _windows_in_blocks(self) -> bool:
        return self.memory.window > 0 and not self._layout.needs_state

    def _parts(self, sequence: int, *, partial: bool = False) -> _Parts:
        """The parts of a sequence's state, each with its groups of the layout."""
        first = self.memory.beside_blocks if partial else 0
        buffer = state_bytes(self.llm, sequence, partial=first > 0)
        parts = self.memory.parse(buffer, first)
        for part, known in zip(parts, self.memory.parts[first:], strict=True):
            if not _same(part, known):
                raise Unsupported(
                    "the engine's state has another layout than its model's metadata tells",
                    "report this with the model's name; kvsnap stores nothing of it",
                )
        return list(zip(parts, self.memory.groups[first:], strict=True))

    def _shared(self, start: int, stop: int, *, partial: bool = False) -> _Parts:
        """The parts of a state of [start, stop) alone: the range is shared with the scratch sequence,
        which moves no data."""
        memory = llama_cpp.llama_get_memory(self.llm.ctx)
        llama_cpp.llama_memory_seq_cp(memory, 0, self._scratch, start, stop)
        try:
            return self._parts(self._scratch, partial=partial)
        finally:
            if self.memory.recurrent:  # refuses to remove a sequence that it has no cell for
                llama_cpp.llama_memory_seq_keep(memory, 0)
            else:
                llama_cpp.llama_memory_seq_rm(memory, self._scratch, -1, -1)

    def _cells(self, start: int, stop: int) -> dict[str, Array]:
        """Rows [start, stop) of the groups in blocks."""
        rows: dict[str, Array] = {}
        if not self._layout.in_blocks.groups:
            return rows
        # Between streams a partial copy asserts, and a recurrent memory lets go of the scratch
        # sequence only together with all others: take all, then cut.
        others = self.memory.recurrent and self.llm.context_params.n_seq_max > 1
        alone = self._streams == 1 and not others
        for part, groups in self._shared(start, stop) if alone else self._parts(0):
            if isinstance(part, State) and groups and groups[0].span is None:
                rows |= _picked(part, groups, start, stop)
        return rows

    @property
    def _streams(self) -> int:
        return max((p.n_stream for p in self.memory.parts if isinstance(p, StateType)), default=1)


_Parts: TypeAlias = list[tuple[Part, tuple[Group, ...]]]


def _picked(part: State, groups: tuple[Group, ...], start: int, stop: int) -> dict[str, Array]:
    """A part's rows at positions [start, stop), in order; `Damaged` unless each is there once."""
    held = (part.positions >= start) & (part.positions < stop)
    cells = np.flatnonzero(held)
    order = order_of(part.positions[cells], start, stop)
    rows: dict[str, Array] = planes_of(groups, part.k, part.v)
    if order is None and len(cells) == len(part.positions):
        return rows
    picked = cells if order is None else cells[order]
    return {name: array[:, picked] for name, array in rows.items()}


def _same(part: Part, known: PartType) -> bool:
    if isinstance(part, Recurrent) or isinstance(known, RecurrentType):
        return part.type == known
    if not len(part.positions):
        return True
    rotations = (part.type.rotation_k, part.type.rotation_v)
    return (part.type.layers, part.type.v_trans) == (known.layers, known.v_trans) and (
        # Versions before 4 do not record the rotation.
        part.type.version < 4 or rotations == (known.rotation_k, known.rotation_v)
    )
