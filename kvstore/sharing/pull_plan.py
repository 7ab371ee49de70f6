"""What a pull has to bring, and whether it may replace what is here. Nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsnap.formats.container import Packed
from kvsnap.formats.errors import Damaged, Diverged, NotFound, Unsupported, Untrusted
from kvsnap.formats.identity import Root, layout_of
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Item, Manifest
from kvsnap.formats.session import SessionFile, pack_session
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.place import SETTINGS
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sessions import Version
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.checks import check_names, root_of_session
from kvsnap.kvstore.sharing.lineage import is_ahead, why_not_newer
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class PullPlan:
    """`missing` of the manifest's files come here, `session` then replaces `started_from`."""

    url: str
    manifest: Manifest
    missing: tuple[Item, ...]
    session: SessionFile
    packed: Packed
    root: Root
    started_from: Version
    same: bool
    """The very session is here already."""

    @property
    def files(self) -> int:
        return len(self.manifest.items) - 1

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.missing)


def plan_pull(
    store: Store,
    remote: Remote,
    name: str,
    *,
    tenant: Tenant | None = None,
    new_name: str | None = None,
    force: bool = False,
) -> PullPlan:
    """What comes. Reads the manifest and the session's file; nothing is written."""
    store.keys.add(tenant)
    found = manifests.require(remote, store.keys, tenant_id(tenant), name)
    manifest = found.manifest
    assert manifest is not None
    store.check_tenant(tenant_id(tenant))
    if store.trust is not None:
        store.trust.check_manifest(manifest, remote.url)
    elif store.encrypt and tenant is not None and not manifest.sealed:
        # Else whoever may write there could put rows into a store that only takes what its key made.
        raise Untrusted(
            f"session {name!r} in {remote.url} is neither sealed nor signed, and this store is encrypted",
            "push it there with --encrypt, or trust who signs it: kvsnap trust add",
        )
    try:
        session, data = manifests.session_of(remote, store.keys, manifest)
    except (Damaged, NotFound) as error:
        raise Damaged(
            f"session {name!r} in {remote.url} cannot be used: {error.what}",
            manifests.bring_again(remote.url),
        ) from error
    root = root_of_session(session, tenant)
    check_names(manifest, session, root)
    _check_block_size(store, manifest)
    packed = Packed((data,), len(data), session.file_digest)
    if new_name not in (None, name):
        session, packed = _renamed(store, session, str(new_name))
    record = session.record
    started_from = store.sessions.version(record.tenant_id, record.name)
    same = started_from[1] == packed.file_digest
    if started_from != (0, "") and not same and not force:
        _check_goes_on(store, session, remote.url)
    missing = [item for item in manifest.items if _is_missing(store, item)]
    return PullPlan(remote.url, manifest, tuple(missing), session, packed, root, started_from, same)


def _check_block_size(store: Store, manifest: Manifest) -> None:
    if manifest.block_size == store.block_size:
        return
    raise Unsupported(
        f"the session's blocks have {manifest.block_size} tokens, this store's"
        f" {store.block_size}: they would never be found",
        f'pull it into a new store (--store) whose {SETTINGS} has "block_size": {manifest.block_size}',
    )


def _check_goes_on(store: Store, session: SessionFile, url: str) -> None:
    record = session.record
    ours = store.sessions.load(record.tenant_id, record.name).record
    if parting := why_not_newer(ours, record):
        raise Diverged(
            f"another session {record.name!r} is here than in {url}: {parting}",
            "push it: all of that one is in it"
            if is_ahead(ours, record)
            else "pull under another name (--as), or over it with --force",
        )


def _renamed(store: Store, session: SessionFile, name: str) -> tuple[SessionFile, Packed]:
    """Its signature covered the name, too; whom this machine believed, it signs for."""
    record = replace(session.record, name=name)
    rows = session.tail_rows()
    key = store.trust.key if store.trust is not None else None
    packed = pack_session(record, session.codec, layout_of(record.identity), rows, key)
    return replace(session, record=record, file_digest=packed.file_digest), packed


def _is_missing(store: Store, item: Item) -> bool:
    if item.kind in (BLOCK, STATE):
        return not store.blocks.has(item.name)
    if item.kind == CALIBRATION:
        return not store.calibrations.path(item.name.hex()).exists()
    return False  # the session's file came with the plan
