"""Why a prompt finds nothing more in the store: the chain ends, or another identity has it."""

from __future__ import annotations

from kvsnap.formats.errors import Damaged
from kvsnap.formats.identity import Root, differences, root_of
from kvsnap.formats.names import TokenIds, chain_names
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store


def why_nothing_matched(
    store: Store, root: Root, tenant: Tenant | None, ids: TokenIds, reused: int
) -> str:
    """One line. Other identities in the store are tried under the same tenant key only: without
    the key nobody can tell whether a prompt is stored."""
    if reused:
        return "end of stored chain"
    for other in _others(store, root, tenant):
        first = chain_names(other.key, ids[: store.block_size], store.block_size)
        if first and store.index.is_reachable(first[0]):
            try:
                changed = differences(other.identity, root.identity)
            except Damaged:
                continue
            if changed:
                field, before, now = changed[0]
                return f"identity: {field} is {now} here, {before} in the stored blocks"
    return "nothing stored for this prompt"


def _others(store: Store, root: Root, tenant: Tenant | None) -> list[Root]:
    rows = store.index.query(
        "SELECT root_id, identity FROM roots WHERE root_id != ?", [root.root_id]
    )
    candidates = (
        (root_id, root_of(identity, tenant))
        for root_id, identity in rows
        if isinstance(identity, str) and identity.isascii()  # else the index is damaged
    )
    return [other for root_id, other in candidates if other.root_id == root_id]
