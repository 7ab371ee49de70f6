"""Which blocks of a store are a tenant's. Who shows a key is shown what is stored under it and nothing
else; without one all is shown, as whoever runs the store sees it anyhow."""

from __future__ import annotations

from kvsnap.formats.identity import root_of
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.store import Store


def own_roots(store: Store, tenant: Tenant | None) -> list[int] | None:
    """Row numbers of the roots of a key; None without one: all of them."""
    if tenant is None:
        return None
    rows = store.index.query("SELECT id, root_id, identity, tenant FROM roots")
    return [
        number
        for number, root_id, identity, sealed_for in rows
        if sealed_for == tenant.tenant_id or _follows(root_id, identity, tenant)
    ]


def own_blocks(store: Store, tenant: Tenant | None, column: str = "root") -> str:
    """SQL that holds for the blocks of a key; without one for all."""
    roots = own_roots(store, tenant)
    return "1" if roots is None else f"{column} IN ({', '.join(map(str, roots))})"


def _follows(root_id: str, identity: object, tenant: Tenant) -> bool:
    """Whether a root that stands in the clear is of this key. Of sealed blocks the identity is not
    known here, and in a damaged index it may be anything."""
    if not isinstance(identity, str) or not identity or not identity.isascii():
        return False
    return root_of(identity, tenant).root_id == root_id
