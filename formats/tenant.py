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


@dataclass(frozen=True)
class Tenant:
    """Holds the 32-byte secret; `repr` and errors never show it."""

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise UsageError(
                f"a tenant key has 32 bytes, this one has {len(self.key)}",
                "give 32 random bytes or 64 hex characters; kvsnap keygen makes some",
            )

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
    text = data.strip()
    if re.fullmatch(rb"[0-9A-Fa-f]{64}", text):
        return Tenant(bytes.fromhex(text.decode("ascii")))
    return Tenant(data)


def _derive(context: str, key: bytes) -> bytes:
    return blake3(key, derive_key_context=context).digest()
