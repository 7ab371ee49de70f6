"""Manifests in a remote: found, read with suspicion, listed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound
from kvsnap.formats.identity import layout_of
from kvsnap.formats.manifest import MAX_MANIFEST, Manifest, manifest_key
from kvsnap.formats.sealed import SealedFile, is_sealed, parse_sealed
from kvsnap.formats.session import SessionFile, parse_session
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes import is_remote_url
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.checks import (
    MOST_ROWS,
    MOST_SESSION_HEADER,
    check_header,
    check_layout,
)
from kvsnap.kvstore.sharing.sealing import (
    keys_named,
    open_manifest,
    read_manifest,
    sealed_manifest_key,
)

FOLDER = "manifests/"
_IN_BOTH = ("name", "tenant_id", "root_id", "fidelity", "block_size", "revision")


@dataclass(frozen=True)
class Pushed:
    """A session in a remote. `manifest` is None for a damaged one, whose `problem` says why, and for a
    sealed one whose tenant's key is not at hand, which names the objects at `keys`."""

    key: str
    version: str
    manifest: Manifest | None
    problem: str = ""
    changed: float = 0.0
    keys: tuple[str, ...] = ()

    @property
    def sealed(self) -> bool:
        return self.manifest is None and not self.problem

    @property
    def named(self) -> list[str]:
        """The keys of the objects that it needs, its own aside."""
        if self.manifest is None:
            return list(self.keys)
        return [self.manifest.item_key(item) for item in self.manifest.items]


def keys_of(keyring: Keyring, tenant_id: str, name: str) -> list[str]:
    """Where a session's manifest can stand: sealed, where the key is at hand, and plain."""
    tenant = keyring.get(tenant_id)
    sealed = [sealed_manifest_key(tenant, name)] if tenant is not None else []
    return [*sealed, manifest_key(tenant_id, name)]


def find(remote: Remote, keyring: Keyring, tenant_id: str, name: str) -> Pushed | None:
    """The session of that name; None where the remote has none."""
    return next(forms(remote, keyring, tenant_id, name), None)


def forms(remote: Remote, keyring: Keyring, tenant_id: str, name: str) -> Iterator[Pushed]:
    """The same, sealed and then plain: a push that seals it may have been cut off between the two."""
    for key in keys_of(keyring, tenant_id, name):
        with suppress(NotFound):
            yield _read(remote, keyring, key)


def require(remote: Remote, keyring: Keyring, tenant_id: str, name: str) -> Pushed:
    """The same with its manifest; raises `NotFound` or `Damaged`."""
    found = find(remote, keyring, tenant_id, name)
    if found is None:
        raise NotFound(
            f"there is no session {name!r} in {remote.url}",
            _what_is_there(remote),
        )
    if found.manifest is None:
        raise Damaged(
            f"the manifest of {name!r} in {remote.url} is damaged: {found.problem}",
            bring_again(remote.url),
        )
    return found


def bring_again(url: str) -> str:
    """What to do about a file that is damaged or missing there."""
    how = "push it again, with --force," if is_remote_url(url) else "export it again"
    return f"{how} from where the session is whole"


def _what_is_there(remote: Remote) -> str:
    if not remote.abilities.list:
        return "check the name; this kind of remote cannot be listed"
    if not is_remote_url(remote.url):
        return "without a name its session is imported, or all that it has are named"
    return f"kvsnap ls {remote.url} shows what is there"


def every(remote: Remote, keyring: Keyring, tenant_id: str | None = None) -> Iterator[Pushed]:
    """All sessions, of one tenant or of all, damaged manifests with their problem."""
    for entry in remote.list(FOLDER if tenant_id is None else f"{FOLDER}{tenant_id}/"):
        with suppress(NotFound):  # removed since it was listed
            yield replace(_read(remote, keyring, entry.key), changed=entry.changed)


def session_of(
    remote: Remote, keyring: Keyring, manifest: Manifest
) -> tuple[SessionFile, memoryview]:
    """The session's own file, checked against the manifest, and its plain bytes. Raises `Damaged`,
    `NotFound`."""
    item = manifest.session
    # Four bytes a token id, and 32 a block's name.
    most = min(item.size, MOST_SESSION_HEADER + MOST_ROWS + 36 * manifest.tokens)
    data = memoryview(remote.get(manifest.item_key(item), most).data)
    check_header(data, MOST_SESSION_HEADER)
    if is_sealed(data):
        check_file_digest(data)
        data = parse_sealed(data).open(keyring.get(manifest.tenant_id))
        check_header(data, MOST_SESSION_HEADER)
    if check_file_digest(data) != item.file.hex():
        raise Damaged("the session's file is not the one that its manifest names")
    session = parse_session(data)
    check_layout(session, layout_of(session.record.identity))
    session.check_talk()
    session.tail_rows()
    record = session.record
    told = [getattr(manifest, name) == getattr(record, name) for name in _IN_BOTH]
    if not all(told) or manifest.tokens != len(record.token_ids):
        raise Damaged("the manifest and the session's file do not say the same")
    return session, data


def _read(remote: Remote, keyring: Keyring, key: str) -> Pushed:
    version = ""
    try:
        found = remote.get(key, MAX_MANIFEST)
        version = found.version
        data = memoryview(found.data)
        check_header(data)
        manifest = read_manifest(data)
        if isinstance(manifest, SealedFile):
            tenant_id = manifest.clear.tenant_id
            if not key.startswith(f"{FOLDER}{tenant_id}/"):
                raise Damaged("it is another tenant's")
            if keyring.get(tenant_id) is None:
                return Pushed(key, version, None, keys=tuple(keys_named(manifest)))
            manifest = open_manifest(manifest, keyring.get(tenant_id))
        if key not in keys_of(keyring, manifest.tenant_id, manifest.name):
            raise Damaged("it is another session's")
        return Pushed(key, version, manifest)
    except NotFound:
        raise
    except Damaged as error:
        return Pushed(key, version, None, error.what)
    except KvsnapError as error:
        if version:  # of another format: read, and not understood
            return Pushed(key, version, None, error.what)
        raise
