"""Why a prompt would hit or miss: what a resume would find, and what stands where it ends.

Read only: nothing is computed or loaded, nothing is moved, deleted or counted as a request. What is
stored under a tenant's key that was not given leaves no trace in the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.break_even import key_of
from kvsnap.kvstore.explain.dry_match import Found, dry_match
from kvsnap.kvstore.explain.gone import evicted_next, lost_next
from kvsnap.kvstore.explain.parting import Parting, parting_from_session, parting_from_sibling
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.wanted import Wanted
from kvsnap.kvstore.why import Difference, another_identity, first_difference

WHOLE = "whole prompt"
NOT_WORTH_IT = "not worth it"
IDENTITY = "identity"
DAMAGED = "damaged"
EVICTED = "evicted"
DIFFERING = "differing token"
END = "end of stored chain"
NOTHING = "nothing stored"
ENDS_AS_IT_SHOULD = "end of stored chain, as it should"

ADVICE = {
    WHOLE: "nothing to do",
    NOT_WORTH_IT: "kvsnap bench crossover measures this machine anew",
    IDENTITY: "run with the other value, or save the prompt once with this one: both stay stored",
    DAMAGED: "save the prompt again: the block is computed anew; kvsnap verify checks the others",
    EVICTED: "save the prompt again, and pin it or raise --capacity to keep it",
    DIFFERING: "put what changes between prompts (names, dates) at their end",
    END: "save the whole prompt to have more of it the next time",
    ENDS_AS_IT_SHOULD: "nothing to do: the rest has to be computed once",
    NOTHING: "kvsnap save stores it; less than a whole block is kept in a named session only",
}
"""Verdict, or a kind of it → what a person can do."""


@dataclass(frozen=True)
class MatchedBlock:
    """`tokens` of it serve the prompt: fewer than it has where the prompt leaves it inside."""

    name: str
    start: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`matched_tokens` could be restored: those of `blocks`, and `tail_tokens` from the session's
    own file, or from the checkpoint `state`. `reused_tokens`: how many a resume would restore, none where that is not worth it.
    `verdict` is one of the words above, `text` one line, `block` the one that is gone."""

    prompt_tokens: int
    matched_tokens: int
    reused_tokens: int
    tail_tokens: int
    block_size: int
    blocks: tuple[MatchedBlock, ...]
    state: str | None
    verdict: str
    text: str
    advice: str
    block: str | None
    differing_token: Parting | None
    identity: Difference | None
    damage: tuple[str, ...]
    checked: bool


@dataclass(frozen=True)
class _End:
    verdict: str
    text: str
    block: str | None = None
    parting: Parting | None = None
    identity: Difference | None = None
    advice: str = ""


def explain(
    session: Session, token_ids: Sequence[int] | TokenIds, *, check: bool = False
) -> Explanation:
    """What `session.resume(token_ids)` would restore into an empty engine, and why no more.

    `check` reads the matched files and compares digests, ids and rows; without it a damaged file
    that nobody has met yet is not noticed.
    """
    ids = token_array(token_ids)
    found = dry_match(session, ids, check=check)
    end = _end(session, ids, found)
    rows = [session.store.index.find(wanted.name) for wanted in found.blocks]
    return Explanation(
        prompt_tokens=len(ids),
        matched_tokens=found.tokens,
        reused_tokens=0 if end.verdict == NOT_WORTH_IT else found.tokens,
        tail_tokens=found.tail,
        block_size=session.store.block_size,
        blocks=tuple(
            _matched(wanted, row.bytes, found.tokens)
            for wanted, row in zip(found.blocks, rows, strict=True)
            if row is not None
        ),
        state=found.state.name.hex() if found.state is not None else None,
        verdict=end.verdict,
        text=end.text,
        advice=ADVICE[end.advice or end.verdict],
        block=end.block,
        differing_token=end.parting,
        identity=end.identity,
        damage=tuple(map(str, found.losses)),
        checked=check,
    )


def _matched(wanted: Wanted, size: int, tokens: int) -> MatchedBlock:
    used = min(len(wanted.token_ids), tokens - wanted.start)
    return MatchedBlock(wanted.name.hex(), wanted.start, used, size)


def _end(session: Session, ids: TokenIds, found: Found) -> _End:
    """The reason that weighs most: what a resume would say, and where it says little, more."""
    store, root = session.store, found.root
    worth = store.break_even.worth(key_of(root.identity), 0, found.tokens, len(ids))
    if not worth.worth:
        return _End(NOT_WORTH_IT, worth.reason.removeprefix(f"{NOT_WORTH_IT}: "))
    if found.tokens >= len(ids) - 1:
        all_but = "all is stored but the last token, which" if found.tokens else "the last token"
        return _End(WHOLE, f"{all_but} is always computed")
    stored = session.stored.record if session.stored is not None else None
    if stored is not None and stored.root_id != session.root.root_id:
        changed = first_difference(
            stored.identity, session.root.identity, f"session {stored.name!r}"
        )
        if changed is not None:
            return _End(IDENTITY, str(changed), identity=changed)
    lost = found.losses[-1] if found.losses else lost_next(store, root, ids, found)
    if lost is not None:
        return _End(DAMAGED, str(lost), block=lost.block or None)
    gone = evicted_next(session, ids, found)
    if gone is not None:
        text = (
            f"session {gone.session!r} shares {gone.tokens} tokens in blocks, of which"
            f" {gone.block[:12]} is not in the store: it was evicted, or there was no room"
        )
        return _End(EVICTED, text, block=gone.block)
    return _end_of_what_is_stored(session, ids, found)


def _end_of_what_is_stored(session: Session, ids: TokenIds, found: Found) -> _End:
    parting = parting_from_session(session, ids, found)
    stored = session.stored.record if session.stored is not None else None
    if parting is None and stored is not None and found.tokens == len(stored.token_ids) > 0:
        return _End(END, f"session {stored.name!r} ends there", advice=ENDS_AS_IT_SHOULD)
    if parting is None and found.tokens < session.store.block_size:
        changed = another_identity(session.store, found.root, session.tenant, ids)
        if changed is not None:
            return _End(IDENTITY, str(changed), identity=changed)
    if parting is None and found.tokens:
        parting = parting_from_sibling(session, ids, found)
    if parting is not None:
        text = (
            f"position {parting.position} is token {parting.token_id} here,"
            f" {parting.stored_token_id} in {parting.stored_in}"
        )
        return _End(DIFFERING, text, parting=parting)
    if found.beyond > found.tokens:
        text = (
            f"blocks go on to position {found.beyond}; there is no state checkpoint to go on from"
        )
        return _End(END, text)
    rest = len(ids) - found.tokens
    if found.tokens == len(found.names) * session.store.block_size > 0:
        text = f"the other {rest} fill no block; only a named session keeps such, for itself"
        return _End(END, text, advice=ENDS_AS_IT_SHOULD)
    if found.tokens:
        return _End(END, "nothing that follows is stored")
    return _End(NOTHING, "no block of this prompt is stored for this model and these settings")
