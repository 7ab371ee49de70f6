"""Remove sessions from a remote: their manifests. Blocks go with the next sweep, if no other session
names them."""

from __future__ import annotations

from collections.abc import Sequence

from kvsnap.formats.errors import NotFound
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.manifests import keys_of


def remove(remote: Remote, keyring: Keyring, tenant_id: str, names: Sequence[str]) -> int:
    """Returns the bytes freed. All or nothing: raises `NotFound` before anything is removed."""
    sizes = dict[str, int]()
    for name in names:
        there = {key: remote.size(key) for key in keys_of(keyring, tenant_id, name)}
        found = {key: size for key, size in there.items() if size is not None}
        if not found:
            raise NotFound(
                f"no session {name!r} in {remote.url}",
                f"kvsnap ls {remote.url} shows what is there",
            )
        sizes |= found
    for key in sizes:
        remote.delete(key)
    return sum(sizes.values())
