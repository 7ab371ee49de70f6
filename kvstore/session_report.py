"""What a resume did, and why it reused no more."""

from __future__ import annotations

from kvsnap.formats.identity import Root
from kvsnap.formats.names import TokenIds
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.chain_reader import REMOTE, Restored
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.why import why_reuse_ended


def stopped_by(
    store: Store,
    root: Root,
    tenant: Tenant | None,
    ids: TokenIds,
    leave: int,
    found: Restored,
    session: SessionRecord | None,
) -> str:
    """One line for a report."""
    if found.tokens == len(ids):
        return "whole prompt"
    if found.tokens == len(ids) - leave:
        return "whole prompt: the last token is always computed"
    if found.damage:
        last = found.damage[-1]
        return last if last.startswith(REMOTE) else f"damaged: {last}"
    if found.skipped:
        return found.skipped
    if found.beyond > found.tokens:
        last = f"the last one is at {found.tokens}" if found.tokens else "there is none"
        return f"state checkpoint: {last}, blocks are stored up to {found.beyond}"
    return why_reuse_ended(store, root, tenant, ids, found.tokens, session)
