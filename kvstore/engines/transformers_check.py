"""Whether a cache's rows are those that the model gives to the ids alone: they are computed again.

A forward may have masked some of the ids, moved positions, or gone on from another beam, and nothing
in a cache says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvsnap.engines.transformers_layers import filled, make_cache
from kvsnap.engines.transformers_probe import arguments, run
from kvsnap.formats.errors import Unsupported
from kvsnap.formats.names import TokenIds

if TYPE_CHECKING:
    from kvsnap.engines.transformers import Transformers

_COMPARED = 8
"""Tokens that are compared at a time: one wrong one among so many shows."""
_ROUNDING = 0.1
"""Relative error of a layer's rows: batches round differently, bfloat16 by 0.02 in deep layers; a
position that is off by one, or padding that was seen, gives 0.3 and more."""
_ROUNDING_FIRST = 0.03
"""The same of the first layer, where bfloat16 rounds by 0.008 at most; where RoPE turns only a part of
each head, a position that is off by one gives less there."""


def check_rows(engine: Transformers) -> None:
    """Raise `Unsupported` for what a save of a single sequence may meet: ids that were masked.

    Looks at the first tokens, and at the positions of the last, for the price of two small forwards;
    computes all tokens again where these or the ids give reason to."""
    ids = engine.token_ids()
    if len(ids) == 0:
        return
    placed = _is_placed(engine)
    same = int(np.argmax(ids != ids[0])) or len(ids)  # padding may have rows of zeros
    tokens = None if not placed or _has_padding(engine.model, ids) else same + _COMPARED
    if not check_row(engine, tokens) and not placed:
        raise _not_alone()


def check_row(engine: Transformers, tokens: int | None = None) -> bool:
    """Raise `Unsupported` unless the rows of the first `tokens` (None: of all) are those of the
    sequence alone. False where nothing could be compared, as windows have lost these rows."""
    held = len(engine.token_ids())
    ids = engine.token_ids()[:tokens]
    if len(ids) == 0:
        return False
    fresh, found = make_cache(engine.model), False
    for start in range(0, len(ids), engine.batch_size):
        _run(engine, ids[start : start + engine.batch_size], fresh, logits_to_keep=1)
    for number in engine.attention_layers():
        own, alone = engine.cache.layers[number], fresh.layers[number]
        if 0 < filled(own) == held and filled(alone) == len(ids):
            found = True
            if _differ(own, alone, slice(0, len(ids)), _ROUNDING):
                raise _not_alone()
    return found


def _is_placed(engine: Transformers) -> bool:
    """Whether the last tokens stand where their ids do: rows of the first layer follow from a token
    and its position alone, so that nothing in front of them is needed. generate() counts positions
    without what it masks."""
    if "position_ids" not in arguments(engine.model) or 0 not in engine.attention_layers():
        return True  # nothing tells
    held = engine.token_ids()
    ids, fresh = held[-_COMPARED:], make_cache(engine.model)
    places = torch.arange(len(held) - len(ids), len(held), device=_device(engine))[None]
    _run(engine, ids, fresh, position_ids=places, logits_to_keep=1)
    own, alone = engine.cache.layers[0], fresh.layers[0]
    last = min(filled(own), filled(alone))
    return not last or not _differ(own, alone, slice(-last, None), _ROUNDING_FIRST)


def _run(engine: Transformers, ids: TokenIds, cache: Any, **more: Any) -> None:
    batch = torch.from_numpy(ids.astype(np.int64))[None].to(_device(engine))
    run(engine.model, batch, cache, **more)


def _device(engine: Transformers) -> torch.device:
    device: torch.device = engine.model.get_input_embeddings().weight.device
    return device


def _differ(own: Any, alone: Any, where: slice, rounding: float) -> bool:
    for name in ("keys", "values"):
        pair = (getattr(layer, name)[:, :, where] for layer in (own, alone))
        for one, other in zip(*(torch.split(rows, _COMPARED, -2) for rows in pair), strict=True):
            here, there = (t.float().nan_to_num(0.0, 0.0, 0.0) for t in (one, other))
            if not float((here - there).norm()) <= rounding * float(there.norm()):
                return True
    return False


def _not_alone() -> Unsupported:
    return Unsupported(
        "the row's KV is not that of the sequence alone",
        "give the token ids and the attention_mask that the model was given, and position_ids as"
        " generate() makes them; beams cannot be saved",
    )


def _has_padding(model: Any, ids: TokenIds) -> bool:
    """Whether generate() would mask some of these by itself."""
    settings = getattr(model, "generation_config", None) or model.config
    pad, eos = getattr(settings, "pad_token_id", None), getattr(settings, "eos_token_id", None)
    ends = eos if isinstance(eos, list) else [eos]
    return pad is not None and pad not in ends and bool((ids == pad).any())
