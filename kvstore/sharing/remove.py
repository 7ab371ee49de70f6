"""Remove sessions from a remote: their manifests. Blocks go with the next sweep, if no other session
names them."""

from __future__ import annotations

from collections.abc import Sequence

from kvsnap.formats.errors import NotFound
from kvsnap.formats.manifest import manifest_key
from kvsnap.kvstore.remotes.base import Remote


def remove(remote: Remote, tenant_id: str, names: Sequence[str]) -> int:
    """Returns the bytes freed. All or nothing: raises `NotFound` before anything is removed."""
    keys = {name: manifest_key(tenant_id, name) for name in names}
    freed = 0
    for name, key in keys.items():
        size = remote.size(key)
        if size is None:
            raise NotFound(
                f"no session {name!r} in {remote.url}",
                f"kvsnap ls {remote.url} shows what is there",
            )
        freed += size
    for key in keys.values():
        remote.delete(key)
    return freed
