"""The model behind a server, computed once here: its identity, and rows to compare the server's with.

The same library computes them as for `kvsnap save` (llama-cpp-python), so that what either of them
stores serves both. The model is loaded with a small context, computes one prompt and is let go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.engines.llamacpp import LlamaCpp
from kvsnap.engines.llamacpp_identity import identity_of
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.identity import Identity
from kvsnap.formats.interchange.llamacpp import LayerType, StateType
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.interchange.rounding import Difference, Rounding

RECURRENT = (
    "the server's slots hold other things than K and V of every token, as those of recurrent layers, and"
    " a slot file does not bring these back: requests are forwarded as they come"
)
PROBE_TOKENS = 64
_ROUND = 256
_FIRST, _COUNT = 3, 190
"""Every vocabulary in use has these ids; words or bytes, it does not matter."""


def probe_ids() -> TokenIds:
    """The prompt that both compute: no token twice in a row, the same for every server."""
    return token_array([_FIRST + (37 * n + n * n) % _COUNT for n in range(PROBE_TOKENS)])


@dataclass(frozen=True)
class Model:
    """What is known of a model under one set of options and one kind of KV cache."""

    identity: Identity
    layout: Layout
    layers: tuple[tuple[LayerType, ...], ...]
    """Of each memory of its slots."""
    rotation: tuple[int, int]
    window: int
    """Tokens, of the layers with a sliding window; 0 where there are none."""
    rows: Rows
    rounding: Rounding

    def refuse(self, kinds: Sequence[StateType]) -> None:
        """Raise `Unsupported` where the server's slots are not of these kinds."""
        rotations = {(kind.rotation_k, kind.rotation_v) for kind in kinds}
        if tuple(kind.layers for kind in kinds) != self.layers or rotations != {self.rotation}:
            raise Unsupported(
                "the server's slots have other layers, types or rotation than this model has here",
                "give the model that the server runs with --model, and a llama-cpp-python and"
                " LLAMA_ATTN_ROT_DISABLE like the server's",
            )

    def difference(self, rows: Rows) -> Difference | None:
        """Where the server's rows of the probe part from those computed here, if by more than
        rounding does."""
        found = self.rounding.difference(rows, self.rows, 0)
        return found if found.size > self.rounding.bound else None


def load_model(
    path: Path,
    options: LoadOptions,
    slot: StateType,
    n_ctx: int,
    block_size: int,
    file_digest: Callable[[Path], str],
) -> Model:
    """Load, compute the probe, let go. `n_ctx`: the server's context of a slot, for models whose
    RoPE factors depend on it. Raises `Unsupported` or `EngineError` for what kvsnap does not handle."""
    if not slot.layers:
        raise Unsupported("the server's slot holds no rows", "use a model with attention")
    first = slot.layers[0]
    wanted = dataclasses.replace(
        options,
        ctx=None,
        cache_type_k=first.k.name,
        cache_type_v=first.v.name,
        flash_attn=not slot.v_trans,
    )
    llm = load_llama(path, wanted, PROBE_TOKENS)
    try:
        engine = LlamaCpp(llm)
        rope = engine.facts.rope
        long = rope is not None and n_ctx > rope.original_context
        if rope is not None and long != rope.long_context:
            llm.close()
            tokens = rope.original_context + _ROUND if long else PROBE_TOKENS
            llm = load_llama(path, dataclasses.replace(wanted, ctx=tokens), tokens)
            engine = LlamaCpp(llm)
        parts = engine.memory.parts
        kv = [part.layers for part in parts if isinstance(part, StateType)]
        if engine.layout.needs_state or len(kv) < len(parts):
            raise Unsupported(RECURRENT, "kvsnap save and kvsnap.llama_server handle such models")
        identity = identity_of(llm, engine.facts, engine.layout, block_size, file_digest)
        facts = engine.facts
        rotation = (facts.rotation_k, facts.rotation_v)
        types = {name: plane.source_type for name, (_, plane) in engine.layout.planes().items()}
        rounding = Rounding(engine, types, rotation)
        rows = {name: array.copy() for name, array in rounding.computed(probe_ids(), 0).items()}
        window = engine.memory.window
        return Model(identity, engine.layout, tuple(kv), rotation, window, rows, rounding)
    finally:
        llm.close()
