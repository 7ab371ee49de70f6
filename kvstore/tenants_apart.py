"""Tenants who would share a store in the clear are told so before anything is written.

Names tell nothing across tenants; the files themselves can be read by whoever can read the folder.
"""

from __future__ import annotations

import contextlib
import os

from kvsnap.formats.errors import UsageError
from kvsnap.formats.tenant import NO_TENANT_ID, is_tenant_id
from kvsnap.kvstore.place import Place


def other_tenant(tenant_id: str, found: str) -> bool:
    """Whether `found` is the id of another tenant with a key."""
    return found not in (tenant_id, NO_TENANT_ID) and is_tenant_id(found)


def refuse_shared_store(place: Place, tenant_id: str) -> None:
    """Raise `UsageError` where something is about to be stored by a tenant's key, in the clear, in a
    store that has another tenant's sessions."""
    if tenant_id == NO_TENANT_ID:
        return
    with contextlib.suppress(OSError):
        for found in os.listdir(place.sessions):  # noqa: PTH208 - names alone
            if other_tenant(tenant_id, found):
                raise UsageError(
                    f"{place.root} has sessions of another tenant, and is not encrypted",
                    "give each tenant a store of its own (--store), or make one encrypted: --encrypt",
                )
