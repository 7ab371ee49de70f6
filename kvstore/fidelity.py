"""Which rows may serve which session: exact ones any, lossy ones only those of their own fidelity.

Exact and lossy chains have different roots, so files never mix. What this module keeps apart is the
engine's memory: rows that were restored with loss must never be stored as exact ones, nor be coded
a second time by another codec.
"""

from __future__ import annotations

import contextlib
import dataclasses

from kvsnap.engines.base import MARKS, Engine, Landing, LossyRows, digest_of
from kvsnap.formats.codecs import Codec, get_codec
from kvsnap.formats.codecs.escape import SINKS
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.formats.identity import EXACT, Identity, Root
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds, common_prefix
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.why import stored_roots


def lossy_roots(store: Store, tenant: Tenant | None, identity: Identity) -> list[Root]:
    """Of what is stored with loss of this model and these settings, and can be decoded here."""
    found = []
    for root in stored_roots(store, tenant):
        with contextlib.suppress(KvsnapError):  # a file may claim any fidelity
            same = dataclasses.replace(identity, fidelity=root.fidelity).canonical()
            codec = get_codec(root.fidelity)
            if same == root.identity and codec.lossy and not codec.of_one_session:
                store.calibrations.prepare(codec)
                found.append(root)
    return found


def codec_of_held(engine: Engine, held: int) -> Codec | None:
    """The lossy codec that rows among the first `held` tokens in the engine were restored from, if
    any were and it is known here."""
    lossy = engine.held_lossy()
    if lossy is None or held <= lossy.start:
        return None
    try:
        codec = get_codec(lossy.fidelity)
    except Unsupported:  # what an interrupted measurement left there
        return None
    return None if codec.of_one_session else codec


def usable_tokens(engine: Engine, held: int, root: Root) -> int:
    """How many of the first `held` tokens in the engine may serve a session under `root`."""
    lossy = engine.held_lossy()
    return held if lossy is None or lossy.fidelity == root.fidelity else min(held, lossy.start)


def mark_lossy(engine: Engine, fidelity: str, landing: Landing, token_ids: TokenIds) -> None:
    """Before the rows of a landing are loaded as those of `token_ids`.

    Before, not after: a Ctrl-C in between must not leave lossy rows in the engine unmarked. The
    first tokens of a sequence are exact in every codec that compresses, and tell nothing.
    """
    start = max(landing.start, _exact_front(fidelity))
    if fidelity == EXACT or start >= len(token_ids):
        return
    digest = digest_of(engine.layout.of_blocks(landing.rows), start - landing.start)
    mark = LossyRows(fidelity, start, token_ids.copy(), digest, start)
    engine.marks = (*engine.marks, mark)[-MARKS:]


def forget_doubts(engine: Engine, rows: Rows, token_ids: TokenIds) -> None:
    """The engine's marks of unverified rows that are these, which were verified meanwhile."""

    def are_these(mark: LossyRows) -> bool:
        there = common_prefix(token_ids, mark.token_ids) > mark.told_by
        return there and digest_of(rows, mark.told_by) == mark.digest

    engine.marks = tuple(
        mark for mark in engine.marks if _exact_front(mark.fidelity) or not are_these(mark)
    )


def set_apart(engine: Engine, root: Root, token_ids: TokenIds) -> None:
    """Before a session of this root puts `token_ids` into the engine: unverified rows that it holds are
    told from then on by the first one that these ids do not share, if there is one. Their front may be
    bit for bit everybody's (that of a first token always is), and tells nothing any more."""
    held = engine.token_ids() if engine.marks else token_ids[:0]

    def told_later(mark: LossyRows) -> LossyRows:
        shared = common_prefix(token_ids, mark.token_ids)
        if mark.fidelity == root.fidelity or _exact_front(mark.fidelity) or shared <= mark.told_by:
            return mark
        if common_prefix(held, mark.token_ids) <= shared:
            return mark
        row = engine.export(shared, shared + 1)
        return dataclasses.replace(mark, told_by=shared, digest=digest_of(row, 0))

    engine.marks = tuple(map(told_later, engine.marks))


def _exact_front(fidelity: str) -> int:
    """How many tokens of a sequence such rows have as the engine computed them."""
    try:
        return 0 if get_codec(fidelity).of_one_session else SINKS
    except Unsupported:  # of a measurement
        return SINKS


def refuse_other_fidelity(engine: Engine, root: Root) -> None:
    """Raise `UsageError` where the engine's rows must not be stored under `root`."""
    held = engine.held_fidelity()
    if held not in (EXACT, root.fidelity):
        raise UsageError(
            f"the engine holds rows of fidelity {held}, and the session is {root.fidelity}:"
            " rows that were restored with loss are not coded again",
            "resume the session before it is saved",
        )
