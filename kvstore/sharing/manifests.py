"""Manifests in a remote: found, read with suspicion, listed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound
from kvsnap.formats.identity import layout_of
from kvsnap.formats.manifest import MAX_MANIFEST, Manifest, manifest_key, parse_manifest
from kvsnap.formats.session import SessionFile, parse_session
from kvsnap.kvstore.remotes import is_remote_url
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.checks import (
    MOST_ROWS,
    MOST_SESSION_HEADER,
    check_header,
    check_layout,
)

FOLDER = "manifests/"
_IN_BOTH = ("name", "tenant_id", "root_id", "fidelity", "block_size", "revision")


@dataclass(frozen=True)
class Pushed:
    """A session in a remote. `manifest` is None for a damaged one, whose `problem` says why."""

    key: str
    version: str
    manifest: Manifest | None
    problem: str = ""
    changed: float = 0.0


def find(remote: Remote, tenant_id: str, name: str) -> Pushed | None:
    """The session of that name; None where the remote has none."""
    key = manifest_key(tenant_id, name)
    try:
        return _read(remote, key)
    except NotFound:
        return None


def require(remote: Remote, tenant_id: str, name: str) -> tuple[Manifest, str]:
    """The same, with its version; raises `NotFound` or `Damaged`."""
    found = find(remote, tenant_id, name)
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
    return found.manifest, found.version


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


def every(remote: Remote) -> Iterator[Pushed]:
    """All sessions of all tenants, damaged manifests with their problem."""
    for entry in remote.list(FOLDER):
        with suppress(NotFound):  # removed since it was listed
            yield replace(_read(remote, entry.key), changed=entry.changed)


def session_of(remote: Remote, manifest: Manifest) -> tuple[SessionFile, memoryview]:
    """The session's own file, checked against the manifest. Raises `Damaged`, `NotFound`."""
    item = manifest.session
    # Four bytes a token id, and 32 a block's name.
    most = min(item.size, MOST_SESSION_HEADER + MOST_ROWS + 36 * manifest.tokens)
    data = memoryview(remote.get(manifest.item_key(item), most).data)
    check_header(data, MOST_SESSION_HEADER)
    if check_file_digest(data) != item.name.hex():
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


def _read(remote: Remote, key: str) -> Pushed:
    version = ""
    try:
        found = remote.get(key, MAX_MANIFEST)
        version = found.version
        data = memoryview(found.data)
        check_header(data)
        check_file_digest(data)
        manifest = parse_manifest(data)
        if manifest.key != key:
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
