"""Why a prompt finds nothing more in the store: the chain ends, or another identity has it."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import Root, differences, root_of
from kvsnap.formats.names import TokenIds, chain_names, common_prefix
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class Difference:
    """The most telling field in which two identities differ; values as in the canonical form.
    `stored_in` says what has the other value."""

    field: str
    here: str
    stored: str
    stored_in: str

    def __str__(self) -> str:
        return f"{self.field} is {self.here} here, {self.stored} in {self.stored_in}"


def why_reuse_ended(
    store: Store,
    root: Root,
    tenant: Tenant | None,
    ids: TokenIds,
    reused: int,
    session: SessionRecord | None,
) -> str:
    """One line, where neither the prompt's end nor damage ended the reuse."""
    if session is not None and session.root_id != root.root_id:
        changed = first_difference(session.identity, root.identity, "the session")
        if changed is not None:
            return f"identity: {changed}"
    elif session is not None and reused < len(session.token_ids):
        return _where_ids_differ(session.token_ids, ids)
    if reused:
        return "end of stored chain"
    other = another_identity(store, root, tenant, ids)
    return f"identity: {other}" if other is not None else "nothing stored for this prompt"


def first_difference(stored: str, here: str, stored_in: str) -> Difference | None:
    """What differs first between two canonical identities. Raises `Damaged` where one is none."""
    changed = differences(stored, here)
    if not changed:
        return None
    field, before, now = changed[0]
    return Difference(field, now, before, stored_in)


def _where_ids_differ(stored: TokenIds, asked: TokenIds) -> str:
    at = common_prefix(stored, asked)
    if at == min(len(stored), len(asked)):
        return "end of stored chain"
    return (
        f"differing token: position {at} is token {int(asked[at])} here,"
        f" {int(stored[at])} in the session"
    )


def another_identity(
    store: Store, root: Root, tenant: Tenant | None, ids: TokenIds
) -> Difference | None:
    """Which field keeps this prompt's first block, stored for another identity, from being used.

    Other identities are tried under the same tenant key only: without the key nobody can tell
    whether a prompt is stored.
    """
    for other in stored_roots(store, tenant):
        if other.root_id == root.root_id:
            continue
        first = chain_names(other.key, ids[: store.block_size], store.block_size)
        if first and store.index.is_reachable(first[0]):
            try:
                changed = first_difference(other.identity, root.identity, "the stored blocks")
            except Damaged:
                continue
            if changed is not None:
                return changed
    return None


def stored_roots(store: Store, tenant: Tenant | None) -> list[Root]:
    """Roots of this tenant under which blocks are stored."""
    rows = store.index.query("SELECT root_id, identity FROM roots")
    candidates = (
        (root_id, root_of(identity, tenant))
        for root_id, identity in rows
        if isinstance(identity, str) and identity.isascii()  # else the index is damaged
    )
    return [other for root_id, other in candidates if other.root_id == root_id]
