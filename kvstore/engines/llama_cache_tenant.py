"""Whose request a `LlamaCache` serves: one tenant for all, or the answer of a callback for each."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvsnap.formats.errors import UsageError
from kvsnap.formats.tenant import Tenant

logger = logging.getLogger("kvsnap")

TenantOf = Callable[[], Tenant | None]
"""Says whose request it is, in the thread that serves it; None: of this one nothing is kept."""


class Tenants:
    """The tenant of the request that is served; before the first one there is none."""

    def __init__(self, tenant: Tenant | TenantOf | None) -> None:
        if not (tenant is None or isinstance(tenant, Tenant) or callable(tenant)):
            raise _no_tenant(tenant)
        self._given = tenant
        self.now: Tenant | None = tenant if isinstance(tenant, Tenant) else None
        self.known = not callable(tenant)
        """Whether `now` is of the request that is served. Else nothing is looked up and nothing stored:
        a guess could be another tenant."""
        self._failing = False

    @property
    def several(self) -> bool:
        return callable(self._given)

    def ask(self) -> tuple[Tenant | None, bool]:
        """(tenant of a request, whether that could be told). Never raises."""
        if not callable(self._given):
            return self._given, True
        try:
            tenant = self._given()
            if tenant is not None and not isinstance(tenant, Tenant):
                raise _no_tenant(tenant)
        except Exception as error:  # noqa: BLE001  a callback may raise anything
            # Its type alone: text and traceback of a callback's error may have a key in them.
            logger.log(
                logging.DEBUG if self._failing else logging.WARNING,
                "kvsnap: cannot tell the tenant of a request, nothing of it is reused or stored: %s",
                error.what if isinstance(error, UsageError) else type(error).__name__,
            )
            self._failing = True
            return None, False
        self._failing = False
        return tenant, tenant is not None

    def turn_to(self, tenant: Tenant | None, known: bool) -> None:
        """A request of this tenant begins."""
        self.now, self.known = tenant, known


def _no_tenant(found: object) -> UsageError:
    return UsageError(
        f"a tenant is a kvsnap.Tenant, None or a callback that gives one, not a {type(found).__name__}",
        "kvsnap.Tenant(key) of 32 bytes",
    )
