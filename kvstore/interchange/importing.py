"""A session out of another tool's file. Nothing in such files says which weights made them, and no checksum
would tell a damaged row: they are not believed, but compared with what the engine computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from kvsnap.formats.codecs.unverified import Unverified
from kvsnap.formats.errors import DoesNotFit, UsageError
from kvsnap.formats.interchange.foreign import ForeignRows
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds, common_prefix
from kvsnap.kvstore.interchange.checking import Check
from kvsnap.kvstore.interchange.fitting import Target
from kvsnap.kvstore.reports import SaveReport
from kvsnap.kvstore.session import Session

UNVERIFIED = "--unverified keeps it for this session alone"


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """`computed_tokens` is how many the engine evaluated to check; `difference` the largest that it
    found, and `bound` up to what it would have taken it."""

    tokens: int
    computed_tokens: int
    verified: bool
    difference: float
    bound: float
    saved: SaveReport


def token_ids_of(rows: ForeignRows, given: TokenIds | None) -> TokenIds:
    """The ids of the rows: the file's, or the caller's where it has none. They must not contradict."""
    if rows.token_ids is None and given is None:
        raise UsageError(
            "the file does not hold its token ids",
            "give what it was made from: --prompt, --prompt-file, --messages or --token-ids",
        )
    if rows.token_ids is None:
        assert given is not None
        if len(given) != rows.tokens:
            raise UsageError(
                f"the file has rows of {rows.tokens} tokens, and {len(given)} were given",
                "give exactly the tokens that it was made from",
            )
        return given
    if given is not None and not rows.ids_proven:
        same = common_prefix(given, rows.token_ids)
        if same < min(len(given), len(rows.token_ids)):
            raise UsageError(
                f"the file's token ids are others than those that were given, from position {same} on",
                "leave them out: the file has its own",
            )
    return rows.token_ids


def import_rows(
    session: Session,
    rows: ForeignRows,
    token_ids: TokenIds,
    *,
    whole: bool = False,
    unverified: bool = False,
    notes: Mapping[str, Any] | None = None,
    step_done: Callable[[str], None] = lambda what: None,
) -> ImportReport:
    """Store the rows of a file as `session`, which must be a new one; when this returns they are durable.

    Verified rows are stored under the engine's own identity, and reused by every prompt that begins so;
    `whole` computes all of them to compare, not only some blocks and each id once. `unverified` ones
    are not compared; their blocks have an identity of their own, of which the digest of all rows is part
    (not that of the file: which rows a reader takes out of it depends on options): this session alone
    restores them.

    Raises `Damaged` where the rows are not what the engine computes, `Unsupported` where they do not fit
    its layout, `UsageError` where the session is there already. The engine holds the rows afterwards, or
    nothing of them.
    """
    engine = session.engine
    if session.stored is not None:
        raise UsageError(
            f"session {session.name!r} is there already", "choose another name, or remove it"
        )
    if len(token_ids) > engine.capacity:
        raise DoesNotFit(
            f"the file holds {len(token_ids)} tokens, the engine's context {engine.capacity}",
            "make the context larger (--ctx)",
        )
    if rows.inexact and not unverified:
        raise UsageError(f"{rows.inexact}: no engine computed these rows", UNVERIFIED)
    if not rows.tokens:
        raise UsageError("the file holds no rows", "there is nothing to import")
    target = Target(engine.identity(session.store.block_size, session.store.file_digest))
    fitted = target.take(rows)
    check = Check(engine, target, fitted, token_ids, session.store.block_size)
    computed, marks = 0, engine.marks
    try:
        if not unverified:
            step_done("computing what is compared")
            computed = check.run(whole=whole)
        else:
            session.store_by(Unverified(source=_digest(fitted)))
        check.put(len(token_ids), session.root.fidelity)
    except BaseException:
        engine.truncate(0)
        engine.marks = marks
        raise
    step_done("storing")
    return ImportReport(
        tokens=len(token_ids),
        computed_tokens=computed,
        verified=not unverified,
        difference=check.difference,
        bound=check.rounding.bound,
        saved=session.save(notes),
    )


def _digest(rows: Rows) -> str:
    """Of all rows, as the engine has them."""
    hasher = blake3()
    for name in sorted(rows):
        hasher.update(np.ascontiguousarray(rows[name]).data.cast("B"))
    return hasher.hexdigest()
