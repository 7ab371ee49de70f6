"""One turn of a conversation, as every application has it: resume, compute the rest, save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import PCG64, Generator

from kvsnap.engines.base import Engine
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.reports import ResumeReport, SaveReport
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class Turn:
    """What the two reports said; `computed` is what the engine really evaluated meanwhile."""

    session: Session
    resumed: ResumeReport
    saved: SaveReport | None
    computed: int


def resume_cases(
    name: str, saved: Sequence[int], other: Sequence[int], block_size: int
) -> list[dict[str, Any]]:
    """Prompts around a saved one: exact, shorter, branching inside a block, longer; with the reuse that
    each must have of an engine that can be cut anywhere. `other` are some 40 ids of another text."""
    length, saved, other = len(saved), list(saved), list(other)
    cases: list[dict[str, Any]] = [{"prompt": saved + other[:7], "reused": length}]
    if length:
        cases.append({"prompt": saved, "reused": length - 1})
    if length > 1:
        shorter = length // 2 + 1
        cases.append({"prompt": saved[:shorter], "reused": shorter - 1})
        branch = length - 1 if length < block_size else length - length % block_size - 20
        cases.append({"prompt": saved[:branch] + other, "reused": branch})
    return [{"saved": name, **case} for case in cases]


def turn(
    store: Store,
    engine: Engine,
    token_ids: Sequence[int] | TokenIds,
    name: str | None = None,
    *,
    tenant: Tenant | None = None,
    codec: str | None = None,
    allow_lossy: bool = False,
    save: bool = True,
) -> Turn:
    """Bring `token_ids` into the engine, from the store as far as it goes; then save."""
    ids = token_array(token_ids)
    session = Session(store, engine, name, tenant=tenant, codec=codec, allow_lossy=allow_lossy)
    before = engine.evaluated
    resumed = session.resume(ids)
    engine.evaluate(ids[resumed.reused_tokens :])
    saved = session.save() if save else None
    return Turn(session, resumed, saved, engine.evaluated - before)


def some_ids(count: int, seed: int = 0, vocabulary: int = 500) -> TokenIds:
    """Token ids that look random and are the same in every process."""
    return Generator(PCG64(seed)).integers(0, vocabulary, count, dtype=np.uint32)
