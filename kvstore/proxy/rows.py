"""Slot files as what the store's readers and writers ask of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvsnap.engines.base import Engine, Landing
from kvsnap.engines.llamacpp_memory import planes_of
from kvsnap.formats.errors import Damaged, EngineError
from kvsnap.formats.identity import Identity
from kvsnap.formats.interchange.ggml_values import are_numbers
from kvsnap.formats.interchange.llama_server_slot import SlotDraft, SlotFile, assemble_slot
from kvsnap.formats.interchange.llamacpp import StateType
from kvsnap.formats.layout import Array, Layout, Rows
from kvsnap.formats.names import TokenIds, token_array


class SlotRows:
    """What a `ChainWriter` asks: the rows of a slot file, of its first `tokens` tokens."""

    def __init__(self, layout: Layout, slot: SlotFile, tokens: int) -> None:
        self.layout = layout
        self._ids = slot.token_ids[:tokens]
        memories = [slot.state] if slot.window is None else [slot.state, slot.window]
        self._k = [(int(own.positions[0]), rows) for own in memories for rows in own.k]
        self._v = [(int(own.positions[0]), rows) for own in memories for rows in own.v]

    def token_ids(self) -> TokenIds:
        return self._ids.copy()

    def export(self, start: int, stop: int) -> Rows:
        """Raises `Damaged` for rows that are no numbers, or not there (of windowed layers).

        Layers are taken one by one: those of a slot whose cells are not in order are copies, each in
        memory of its own, and no view spans them as it does the layers of one buffer.
        """
        rows: dict[str, Array] = {}
        first = 0
        for group in self.layout.groups:
            for name, layers in (("k", self._k), ("v", self._v)):
                own = layers[first : first + group.layers]
                if any(begins > start for begins, _ in own):
                    raise Damaged(
                        f"the slot lacks the rows of {group.name} layers at token {start}"
                    )
                rows[f"{group.name}.{name}"] = np.stack(
                    [layer[start - begins : stop - begins] for begins, layer in own]
                )
            first += group.layers
        check_finite(self.layout, rows)
        return rows

    def export_state(self) -> Rows:
        return {}


class SlotLanding(Engine):
    """What a `ChainReader` asks: an engine that holds nothing, and keeps the slot file that is loaded
    into it as `draft`, for `token_ids` and the first of them."""

    def __init__(self, layout: Layout, kinds: Sequence[StateType], token_ids: TokenIds) -> None:
        self._layout, self._kinds, self._ids = layout, kinds, token_ids
        self.draft: SlotDraft | None = None
        self.tokens = 0

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def capacity(self) -> int:
        return len(self._ids)

    def token_ids(self) -> TokenIds:
        return token_array([])

    def landing(self, stop: int, start: int = 0) -> Landing:
        draft = assemble_slot(self._ids[:stop], *self._kinds)
        return Landing(start, stop, planes_of(self._layout.groups, draft.k, draft.v), draft)

    def load(self, landing: Landing, token_ids: TokenIds) -> None:
        if landing.start or len(token_ids) != landing.stop:
            raise EngineError("a slot file is made of all its rows")
        assert isinstance(landing.buffer, SlotDraft)
        self.draft, self.tokens = landing.buffer, landing.stop

    def identity(self, block_size: int, file_digest: Callable[[Path], str]) -> Identity:
        raise NotImplementedError("that of a server is found in identity.py")

    def export(self, start: int, stop: int) -> Rows:
        raise NotImplementedError("it holds nothing")

    def truncate(self, tokens: int) -> None:
        return

    def evaluate(
        self, token_ids: TokenIds, step_done: Callable[[int], None] = lambda tokens: None
    ) -> None:
        raise NotImplementedError("it holds nothing")


def check_finite(layout: Layout, rows: Mapping[str, Array]) -> None:
    """Raise `Damaged` where a row holds an infinity or no number."""
    for name, (_, plane) in layout.in_blocks.planes().items():
        if not are_numbers(rows[name], plane.source_type):
            raise Damaged(f"the slot's {name} holds values that are no numbers")
