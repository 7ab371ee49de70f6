"""What a push has to move, and whether it may replace what stands there. Nothing is written."""

from __future__ import annotations

import reprlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from kvsnap.formats.errors import Damaged, Diverged, NotFound
from kvsnap.formats.manifest import BLOCK, STATE, Item, Manifest, block_key, manifest_key
from kvsnap.formats.session import SessionFile
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.contents import manifest_of
from kvsnap.kvstore.sharing.lineage import is_ahead, why_not_newer
from kvsnap.kvstore.sharing.sealing import sealed_manifest_key
from kvsnap.kvstore.sharing.signed_there import is_signed_there
from kvsnap.kvstore.sharing.transfer import AT_ONCE, in_order
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import Trust


@dataclass(frozen=True)
class PushPlan:
    """`missing` of the manifest's files move. `replaces`: the version of the remote's manifest that
    the new one may replace, None where there is none, empty where something stands there that cannot
    even be read; `unchanged`: it names all this already. `instead`: what stands there of the session in
    the clear, its manifest and its own file, that the sealed one at `key` takes the place of."""

    url: str
    manifest: Manifest
    missing: tuple[Item, ...]
    key: str
    instead: tuple[str, ...]
    replaces: str | None
    unchanged: bool
    tenant: Tenant | None
    """By whose key it is sealed there."""
    blocks: int
    """Of the session's chain, whether they are here or not."""

    @property
    def files(self) -> int:
        return len(self.manifest.items)

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.missing)

    @property
    def evicted(self) -> int:
        """Blocks of the chain that are neither here nor, as far as its manifest tells, there."""
        return self.blocks - len(self.manifest.of_kind(BLOCK))


def plan_push(
    store: Store,
    remote: Remote,
    session: SessionFile,
    *,
    force: bool = False,
    known: Container[bytes] = (),
    trust: Trust | None = None,
    encrypt: bool = False,
) -> PushPlan:
    """What moves, with `trust` with signatures where there is `trust`. A session that is sealed there stays
    so. Nothing is written, here or there."""
    record = session.record
    found = list(manifests.forms(remote, store.keys, record.tenant_id, record.name))
    encrypt = encrypt or any(one.manifest is not None and one.manifest.sealed for one in found)
    tenant = store.keys.require(record.tenant_id) if encrypt else None
    manifest = here = manifest_of(store, session, tenant)
    for old in [one.manifest for one in found if one.manifest is not None]:
        if not (force or old.session.file == manifest.session.file or old.session.file in known):
            _check_goes_on(remote, store.keys, old, session)
    key = manifest_key(record.tenant_id, record.name)
    if tenant is not None:
        key = sealed_manifest_key(tenant, record.name)
    there = next((one for one in found if one.key == key), None)
    named, own = set[bytes](), there.manifest if there is not None else None
    if own is not None and (trust is None or trust.believes_manifest(own)):
        manifest = _with_what_is_there(remote, manifest, own, session, trust)
        named = {item.name for item in own.items}
    return PushPlan(
        url=remote.url,
        manifest=manifest,
        missing=here.items if force else tuple(_missing(remote, manifest, trust)),
        key=key,
        replaces=there.version if there is not None else None,
        instead=tuple(k for one in found if one.key != key for k in _own_keys(one)),
        unchanged=not force and named >= {item.name for item in manifest.items},
        tenant=tenant,
        blocks=len(record.chain),
    )


def _own_keys(pushed: manifests.Pushed) -> list[str]:
    """A session's own file, which no other session names, and its manifest: last, so that whoever is
    cut off before it finds both again."""
    manifest = pushed.manifest
    return [*([manifest.item_key(manifest.session)] if manifest is not None else []), pushed.key]


def _check_goes_on(remote: Remote, keyring: Keyring, old: Manifest, session: SessionFile) -> None:
    """Raise `Diverged` unless the session goes on from the one that is there, as a newer revision."""
    try:
        theirs = manifests.session_of(remote, keyring, old)[0].record
    except (NotFound, Damaged):
        return  # nobody can pull it
    parting = why_not_newer(theirs, session.record)
    if not parting:
        return
    raise Diverged(
        f"{remote.url} has another {old.name!r}, pushed by {reprlib.repr(old.creator)}: {parting}",
        "pull it: all of this one is in it"
        if is_ahead(theirs, session.record)
        else "pull it under another name (--as), or push over it with --force",
    )


def _with_what_is_there(
    remote: Remote,
    manifest: Manifest,
    old: Manifest,
    session: SessionFile,
    trust: Trust | None,
) -> Manifest:
    """The manifest with blocks of the same chain that went here and that the remote still has, as
    far as they are believed."""
    blocks, theirs = manifest.of_kind(BLOCK), old.of_kind(BLOCK)
    more = []
    for name, item in zip(session.record.chain[len(blocks) :], theirs[len(blocks) :], strict=False):
        if item.name != name or remote.size(block_key(name)) is None:
            break
        if trust is not None and not is_signed_there(remote, item, old.root_id, trust):
            break
        more.append(item)
    rest = [item for item in manifest.items if item.kind != BLOCK]
    return replace(manifest, items=(*blocks, *more, *rest))


def _missing(remote: Remote, manifest: Manifest, trust: Trust | None) -> list[Item]:
    """What has to move, as far as can be told from few questions: the end of the blocks that are
    there is galloped for, and the last few before it, where a push may have been cut off, and all
    that is no block are asked for one by one."""
    if trust is not None or manifest.sealed:
        return _not_as_wanted(remote, manifest, trust)
    lacking = {item.name for item in missing_blocks(remote, manifest.of_kind(BLOCK))}

    def there(item: Item) -> bool:
        return remote.size(manifest.item_key(item)) is not None

    others = [item for item in manifest.items if item.kind != BLOCK]
    lacking |= {item.name for item, found in in_order(there, others) if not found}
    return [item for item in manifest.items if item.name in lacking]


def unsigned_there(remote: Remote, items: Sequence[Item], root_id: str, trust: Trust) -> list[Item]:
    """Blocks that have to move where signatures count: each is looked at."""

    def there(item: Item) -> bool:
        return is_signed_there(remote, item, root_id, trust)

    return [item for item, found in in_order(there, items) if not found]


def _not_as_wanted(remote: Remote, manifest: Manifest, trust: Trust | None) -> list[Item]:
    """What has to move where signatures count, or all is sealed: each file is looked at. A plain block
    has another length than a sealed one; what else a session has is small, and goes in any case."""
    blocks = [item for item in manifest.items if item.kind in (BLOCK, STATE)]

    def other_length(item: Item) -> bool:
        return remote.size(manifest.item_key(item)) != item.size

    lacking = set[bytes]()
    if manifest.sealed:
        looked_at = manifest.items if trust is None else blocks
        lacking |= {item.name for item, other in in_order(other_length, looked_at) if other}
    if trust is not None:
        lacking |= {item.name for item in manifest.items if item.kind not in (BLOCK, STATE)}
        unsure = [item for item in blocks if item.name not in lacking]
        lacking |= {i.name for i in unsigned_there(remote, unsure, manifest.root_id, trust)}
    return [item for item in manifest.items if item.name in lacking]


def missing_blocks(remote: Remote, blocks: Sequence[Item]) -> list[Item]:
    def there(item: Item) -> bool:
        return remote.size(block_key(item.name)) is not None

    depth = gallop(lambda number: there(blocks[number]), len(blocks))
    # Where a push was cut off there are holes in the last few, and galloping may stop at one.
    first, last = max(0, depth - AT_ONCE), depth + AT_ONCE
    lacking = [item for item, found in in_order(there, blocks[first:last]) if not found]
    return lacking + list(blocks[last:])
