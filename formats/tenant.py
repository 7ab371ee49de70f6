"""The tenant's key: who may share. It is mixed into the root, so it decides every name.

One secret of 32 bytes; the keys for naming, for sealing and for session names, and the tenant's id, are
derived from it by context string (BLAKE3's derive_key), so that none of them gives away another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from blake3 import blake3

from kvsnap.formats.errors import UsageError

NO_TENANT_ID = "default"
"""Folder of the sessions of a store used without a key; a derived id is 64 hex characters."""


@dataclass(frozen=True, init=False)
class Tenant:
    """Holds the 32-byte secret; `repr` and errors never show it."""

    key: bytes = field(repr=False)

    def __init__(self, key: bytes) -> None:
        if isinstance(key, bytes) and len(key) == 32:
            object.__setattr__(self, "key", key)
            return
        found = (
            f"this one has {len(key)}" if isinstance(key, bytes) else f"not {type(key).__name__}"
        )
        del key  # a traceback that shows variables must not show what may be most of a key
        raise _no_key(found)

    @property
    def naming_key(self) -> bytes:
        return _derive("kvsnap naming key", self.key)

    @property
    def sealing_key(self) -> bytes:
        """What the keys of sealed files are derived from."""
        return _derive("kvsnap sealing key", self.key)

    @property
    def session_key(self) -> bytes:
        """Keys the file names of sealed sessions."""
        return _derive("kvsnap session names", self.key)

    @property
    def tenant_id(self) -> str:
        return _derive("kvsnap tenant id", self.key).hex()


def tenant_id(tenant: Tenant | None) -> str:
    """The id that stands in session paths: derived from the key, or `default` without one."""
    return tenant.tenant_id if tenant else NO_TENANT_ID


def is_tenant_id(text: str) -> bool:
    """Whether it can stand in a path as the id of a tenant."""
    return text == NO_TENANT_ID or re.fullmatch(r"[0-9a-f]{64}", text) is not None


def parse_key(data: bytes) -> Tenant:
    """Read a key file's content: 64 hex characters (white space around them), or 32 raw bytes."""
    key = data
    if re.fullmatch(rb"\s*[0-9A-Fa-f]{64}\s*", data):
        key = bytes.fromhex(data.strip().decode("ascii"))
    if len(key) == 32:
        return Tenant(key)
    size = len(key)
    del data, key  # as in `Tenant`
    raise _no_key(f"this one has {size}")


def _no_key(found: str) -> UsageError:
    return UsageError(
        f"a tenant key has 32 bytes, {found}",
        "give 32 random bytes or 64 hex characters; kvsnap keygen makes some",
    )


def _derive(context: str, key: bytes) -> bytes:
    return blake3(key, derive_key_context=context).digest()
