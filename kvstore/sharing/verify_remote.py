"""Check a remote's sessions and the files that they name, down to the decoded rows. Nothing is moved
or mended: pushing again from where a session is whole replaces what is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsnap.formats.codecs.calibration import register
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Unsupported, UsageError
from kvsnap.formats.identity import layout_of
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Item, Manifest, content_of
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.checks import check_names, root_of_session, wanted_files
from kvsnap.kvstore.sharing.fetch import fetch_block, fetch_calibration
from kvsnap.kvstore.sharing.transfer import at_once_of, in_order
from kvsnap.kvstore.trust import Trust
from kvsnap.kvstore.verify import Bad, VerifyReport

NO_KEY = "it belongs to a tenant whose key is not at hand; its files were not checked"


def verify_remote(
    remote: Remote,
    *,
    name: str | None = None,
    tenant: Tenant | None = None,
    trust: Trust | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """One session, or all of them: with a tenant's key all of its own. A block that several share is
    read once. Without a key sessions of tenants are counted as unreachable, not as bad. With `trust`, what no trusted key signed is
    bad. Raises `NotFound`, `RemoteError`."""
    report, keys = VerifyReport(), Keyring()
    keys.add(tenant)
    if name is None:
        own = tenant.tenant_id if tenant is not None else None
        pushed = list(manifests.every(remote, keys, own))
    else:
        pushed = [manifests.require(remote, keys, tenant_id(tenant), name)]
    checked, opener = set[bytes](), Opener(trust, keys=keys)
    total, done = sum(len(one.manifest.items) for one in pushed if one.manifest), 0
    for one in pushed:
        report.checked += 1
        if one.sealed:
            report.unreachable.append(f"{one.key}: {NO_KEY}")
            continue
        if one.manifest is None:
            report.bad.append(Bad(one.key, one.key, one.problem))
            continue
        try:
            if trust is not None:
                trust.check_manifest(one.manifest, remote.url)
            for item, error in _session(remote, one.manifest, tenant, opener, checked, report):
                report.checked += 1
                if error is not None:
                    key = one.manifest.item_key(item)
                    report.bad.append(Bad(item.name.hex(), key, error.what))
                done += 1
                progress(done, total)
        except (Damaged, NotFound, Unsupported) as error:
            report.bad.append(Bad(one.manifest.name, one.key, error.what))
        except UsageError:
            report.unreachable.append(f"{one.key}: {NO_KEY}")
    progress(total, total)
    return report


def _session(
    remote: Remote,
    manifest: Manifest,
    tenant: Tenant | None,
    opener: Opener,
    checked: set[bytes],
    report: VerifyReport,
) -> Iterator[tuple[Item, KvsnapError | None]]:
    """Each of its files that was not `checked` yet, and what is wrong with it."""
    session, _ = manifests.session_of(remote, opener.keys, manifest)
    report.checked += 1
    root = root_of_session(session, tenant)
    check_names(manifest, session, root)
    wanted, layout = wanted_files(manifest, session, root), layout_of(root.identity)

    def check(item: Item) -> KvsnapError | None:
        try:
            if item.kind == CALIBRATION:
                register(fetch_calibration(remote, manifest, item))
            else:
                own, content, sealed = wanted[item.name], content_of(item), manifest.sealed
                fetch_block(remote, opener, root, own, layout, content, sealed=sealed)
        except (NotFound, Damaged, Unsupported) as error:
            return error
        return None

    at_once = at_once_of(layout.in_blocks.size(manifest.block_size))
    for kinds in ((CALIBRATION,), (BLOCK, STATE)):  # no block can be decoded without the first
        items = [item for kind in kinds for item in manifest.of_kind(kind)]
        unread = [item for item in items if item.name not in checked]
        for item, error in in_order(check, unread, at_once):
            checked.add(item.name)
            yield item, error
