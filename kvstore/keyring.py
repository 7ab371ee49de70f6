"""The tenants' keys at hand: with them sealed files are opened, and made."""

from __future__ import annotations

from kvsnap.formats.errors import UsageError
from kvsnap.formats.tenant import NO_TENANT_ID, Tenant


class Keyring:
    """Of one open store: whoever comes with a tenant leaves its key here."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self.seals = False
        """Whether the store is an encrypted one: what it writes is sealed."""

    def add(self, tenant: Tenant | None) -> None:
        if tenant is not None:
            self._tenants[tenant.tenant_id] = tenant

    def get(self, tenant_id: str) -> Tenant | None:
        return self._tenants.get(tenant_id)

    def require(self, tenant_id: str) -> Tenant:
        """The key to seal with. Raises `UsageError` where there is none."""
        found = self._tenants.get(tenant_id)
        if found is not None:
            return found
        which = "no tenant key was given" if tenant_id == NO_TENANT_ID else "that was not given"
        raise UsageError(
            f"what is to be sealed needs the tenant's key, and {which}",
            "give the tenant's key: --tenant-key-file; kvsnap keygen makes one",
        )
