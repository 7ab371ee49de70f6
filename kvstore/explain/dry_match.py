"""What a resume would find of a prompt, without its side effects: nothing is loaded or set aside.

It looks where `Session.resume` looks, in the same order, with an engine that holds nothing yet.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged, KvsnapError
from kvsnap.formats.identity import Root
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.kvstore import files
from kvsnap.kvstore.compare import difference
from kvsnap.kvstore.match import Match, longest_usable, tail_reach
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.wanted import Wanted


@dataclass(frozen=True)
class Loss:
    """Something stored that cannot be used. `block` is empty for a session's tail."""

    block: str
    reason: str

    def __str__(self) -> str:
        return f"block {self.block[:12]}: {self.reason}" if self.block else self.reason


@dataclass(frozen=True)
class Found:
    """`tokens` at the front could be restored: from these blocks, of which the last may be cut,
    and `tail` tokens from the session's own file. `names`: of all filled blocks of the prompt,
    under `root`. `state`, `beyond`: as in `Match`."""

    root: Root
    tokens: int
    blocks: tuple[Wanted, ...]
    tail: int
    names: list[bytes]
    losses: tuple[Loss, ...]
    state: Wanted | None = None
    beyond: int = 0


def dry_match(session: Session, ids: TokenIds, *, check: bool = False) -> Found:
    """What is stored of `ids`, all but the last token. A file that is missing is noticed; what is
    in the files only with `check`, which reads and decodes them."""
    found = [_under(session, root, ids, check) for root in session.roots()]
    best = max(found, key=lambda each: each.tokens)  # the first of equals, as in `ChainReader`
    own = (each for each in found if each.root == session.root)
    return best if best.tokens else next(own, best)


def _under(session: Session, root: Root, ids: TokenIds, check: bool) -> Found:
    store, size = session.store, session.store.block_size
    limit = max(0, len(ids) - 1)
    names = chain_names(root.key, ids, size)
    blocks = copy.copy(store.blocks)
    blocks.misses = dict(store.blocks.misses)  # this look's verdicts must not outlive it
    losses: list[Loss] = []
    right: set[bytes] = set()
    while True:
        match = longest_usable(session.layout, blocks, root, names, ids, size, limit)
        bad = _first_bad(session, root, match, right, check)
        if bad is None:
            break
        name, reason = bad
        blocks.misses[name] = reason
        losses.append(Loss(name.hex(), reason))
    depth = match.tokens // size
    if depth < len(names) and names[depth] in store.blocks.misses:
        losses.append(Loss(names[depth].hex(), store.blocks.misses[names[depth]]))
    reach = _tail_reach(session, root, ids, match, limit, losses)
    start = reach and _tail_start(session)
    used = match.blocks[: start // size] if reach else match.blocks
    return Found(
        root,
        max(match.tokens, reach),
        tuple(used),
        reach - start,
        names,
        tuple(losses),
        match.state,
        match.beyond,
    )


def _first_bad(
    session: Session, root: Root, match: Match, right: set[bytes], check: bool
) -> tuple[bytes, str] | None:
    for wanted in (*match.blocks, *([match.state] if match.state else ())):
        if wanted.name not in right:
            problem = _problem(session, root, wanted, check)
            if problem is not None:
                return wanted.name, problem
            right.add(wanted.name)
    return None


def _problem(session: Session, root: Root, wanted: Wanted, check: bool) -> str | None:
    """Why a block's file cannot be used, as far as was looked. A file of another length than the
    index says is read in any case: the file is believed, where it is whole."""
    row = session.store.index.find(wanted.name)
    path = session.store.place.block(wanted.name)
    size = files.file_size(path)
    if size is None:
        return "the file is missing"
    if not check and row is not None and row.bytes == size:
        return None
    try:
        buffer = files.read_whole(path)
        block = session.store.opener.block(buffer, root.tenant_id)
        session.store.calibrations.prepare(block.codec)
        block.check_content()
    except KvsnapError as error:
        return error.what
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return difference(block.record, root, wanted)


def _tail_reach(
    session: Session, root: Root, ids: TokenIds, match: Match, limit: int, losses: list[Loss]
) -> int:
    """How far the session's own tail brings the prompt; 0 where its rows are damaged."""
    own, size = session.stored, session.store.block_size
    record = own.record if own else None
    reach = tail_reach(record, root, match, ids, limit, size)
    if own is None or not reach:
        return 0
    try:
        session.store.sessions.tail_rows(own)
    except Damaged as error:
        losses.append(Loss("", f"tail of session {own.record.name!r}: {error.what}"))
        return 0
    return reach


def _tail_start(session: Session) -> int:
    assert session.stored is not None
    return session.stored.record.tail_start
