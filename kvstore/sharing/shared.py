"""Tenants who share a place without encryption are told so, before anything is written."""

from __future__ import annotations

from kvsnap.formats.errors import UsageError
from kvsnap.formats.tenant import NO_TENANT_ID
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.tenants_apart import other_tenant

FOLDER = "manifests/"


def refuse_sharing(remote: Remote, tenant_id: str) -> None:
    """Raise `UsageError` where a session with a tenant's key is about to go unsealed where another
    tenant's are. Names tell nothing across tenants; files can be read by all who share the place."""
    if tenant_id == NO_TENANT_ID or not remote.abilities.list:
        return
    for entry in remote.list(FOLDER):
        if other_tenant(tenant_id, entry.key.split("/")[1]):
            raise UsageError(
                f"{remote.url} has sessions of another tenant, who could read this one's files",
                "push with --encrypt, or to a place of its own",
            )
