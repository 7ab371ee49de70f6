"""Prefill a session's prompt and generate after it, counting what the engine really evaluated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from kvsnap.engines.text import TextEngine
from kvsnap.formats.errors import StoreFull, UsageError
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.reports import ResumeReport
from kvsnap.kvstore.session import Session


@dataclass
class Timings:
    """Seconds; `first_token` counts from the prompt being known to the first new token."""

    restore: float = 0.0
    prefill: float = 0.0
    first_token: float | None = None
    generate: float = 0.0


@dataclass
class Answer:
    """Filled while the functions below run. `ended`: the model ended by itself; `context_full`:
    the context had no room for as many tokens as were asked for."""

    report: ResumeReport | None = None
    computed_tokens: int = 0
    new_ids: list[int] = field(default_factory=list)
    ended: bool = False
    context_full: bool = False
    seconds: Timings = field(default_factory=Timings)


def prefill(
    session: Session,
    engine: TextEngine,
    token_ids: TokenIds,
    result: Answer,
    step_done: Callable[[int, int], None] = lambda done, total: None,
    *,
    leave: int = 1,
    store_on_the_way: bool = False,
    places: Sequence[int] = (),
) -> ResumeReport:
    """Restore what is stored, compute the rest. `step_done(done, total)` after each batch.

    A model that needs state checkpoints gets them at `places`, where other conversations may go
    their own way, and at the last block's edge, for the same prompt again: it is evaluated up to
    each of these at a time, as the state exists there at that moment only. With `store_on_the_way` filled blocks are stored between batches, so that an interruption
    costs one batch; not in front of a first token, which somebody waits for.
    """
    started = time.perf_counter()
    report = session.resume(token_ids, leave=leave)
    restored = time.perf_counter()
    total, before = len(token_ids), engine.evaluated
    step_done(report.reused_tokens, total)

    def after_batch(tokens: int) -> None:
        done = report.reused_tokens + engine.evaluated - before
        step_done(done, total)
        nonlocal store_on_the_way
        if store_on_the_way and done < total:
            try:
                session.put_filled()
            except StoreFull:
                store_on_the_way = False  # what is computed is not lost: the save says what fits

    done = report.reused_tokens
    for stop in (*_stops(session, done, total, places), total):
        engine.evaluate(token_ids[done:stop], after_batch)
        done = stop
        if stop < total:
            with contextlib.suppress(StoreFull):
                session.checkpoint()
    result.report = report
    result.computed_tokens = engine.evaluated - before
    result.seconds.restore = restored - started
    result.seconds.prefill = time.perf_counter() - restored
    return report


def _stops(session: Session, reused: int, total: int, places: Sequence[int]) -> list[int]:
    if not session.layout.needs_state or total == 0:
        return []
    size = session.store.block_size
    edge = (total - 1) // size * size
    return sorted({stop for stop in (*places, edge) if reused < stop < total})


def generate(
    engine: TextEngine,
    token_ids: TokenIds,
    result: Answer,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Generator[int, None, None]:
    """Yield up to `max_tokens` new ids. Afterwards the engine holds KV of every one of them, also
    where the caller stops before the end (`close`, or a `break` out of the loop) or the engine is
    interrupted."""
    if len(token_ids) == 0:
        raise UsageError(
            "there is nothing to evaluate: the session has no tokens and no prompt was given",
            "give a prompt: --prompt, --prompt-file, --messages or --token-ids",
        )
    room = engine.capacity - len(token_ids)
    result.context_full = room < max_tokens
    started = time.perf_counter()
    tokens = engine.generate(token_ids, temperature=temperature, seed=seed)
    try:
        while len(result.new_ids) < min(max_tokens, room):
            token = next(tokens, None)
            if result.seconds.first_token is None:
                waited = time.perf_counter() - started
                before = result.seconds.restore + result.seconds.prefill
                result.seconds.first_token = before + waited
            if token is None:
                result.ended = True
                break
            result.new_ids.append(token)
            yield token
    finally:
        # The last token was sampled, not evaluated: without this its KV would not exist, and the
        # next turn would be one position off.
        held = len(engine.token_ids()) - len(token_ids)
        engine.evaluate(token_array(result.new_ids[max(0, held) :]))
        result.seconds.generate = time.perf_counter() - started
