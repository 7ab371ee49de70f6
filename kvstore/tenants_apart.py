"""Tenants who would share a store in the clear are told so before anything is written.

Names tell nothing across tenants; the files themselves can be read by whoever can read the folder.
"""

from __future__ import annotations

import contextlib
import os

from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import root_of
from kvsnap.formats.tenant import NO_TENANT_ID, Tenant, is_tenant_id
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place


def other_tenant(tenant_id: str, found: str) -> bool:
    """Whether `found` is the id of another tenant with a key."""
    return found not in (tenant_id, NO_TENANT_ID) and is_tenant_id(found)


def refuse_shared_store(place: Place, index: Index, tenant_id: str, tenant: Tenant | None) -> None:
    """Raise `UsageError` where something is about to be stored by a tenant's key, in the clear, in a
    store that has another tenant's sessions or blocks. `tenant`: the key, without which the blocks
    are not looked at."""
    if tenant_id == NO_TENANT_ID:
        return
    found = list[str]()
    with contextlib.suppress(OSError):
        found = os.listdir(place.sessions)  # noqa: PTH208 - names alone
    if any(other_tenant(tenant_id, name) for name in found) or _has_blocks_of_others(index, tenant):
        raise UsageError(
            f"{place.root} has files of another tenant, and is not encrypted",
            "give each tenant a store of its own (--store), or make one encrypted: --encrypt",
        )


def _has_blocks_of_others(index: Index, tenant: Tenant | None) -> bool:
    """Blocks without a session are in no tenant's folder; their root follows from a key, or from none."""
    if tenant is None:
        return False
    sql = (
        "SELECT root_id, identity FROM roots WHERE id IN (SELECT root FROM totals WHERE blocks > 0)"
        " AND tenant = ''"
    )
    return any(
        root_id not in (root_of(identity).root_id, root_of(identity, tenant).root_id)
        for root_id, identity in index.query(sql)
        if isinstance(identity, str) and identity.isascii()  # else the index is damaged
    )
