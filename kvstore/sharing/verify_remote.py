"""Check a remote's sessions and the files that they name, down to the decoded rows. Nothing is moved
or mended: pushing again from where a session is whole replaces what is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsnap.formats.codecs.calibration import parse_calibration, register
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Unsupported, UsageError
from kvsnap.formats.identity import Root, layout_of
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Item, Manifest
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.blocks import Wanted, check_foreign
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.checks import (
    MOST_CALIBRATION,
    check_header,
    check_names,
    longest_block,
    root_of_session,
    wanted_files,
)
from kvsnap.kvstore.sharing.transfer import at_once_of, in_order
from kvsnap.kvstore.verify import Bad, VerifyReport

NO_KEY = "it belongs to a tenant whose key is not at hand; its files were not checked"


def verify_remote(
    remote: Remote,
    *,
    name: str | None = None,
    tenant: Tenant | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """One session, or all of them; a block that several share is read once. Sessions of other
    tenants' keys are counted as unreachable, not as bad. Raises `NotFound`, `RemoteError`."""
    report = VerifyReport()
    if name is not None:
        manifests.require(remote, tenant_id(tenant), name)
        found = manifests.find(remote, tenant_id(tenant), name)
        pushed = [found] if found is not None else []
    else:
        pushed = list(manifests.every(remote))
    checked: set[bytes] = set()
    total, done = sum(len(one.manifest.items) for one in pushed if one.manifest), 0
    for one in pushed:
        report.checked += 1
        if one.manifest is None:
            report.bad.append(Bad(one.key, one.key, one.problem))
            continue
        try:
            for _ in _session(remote, one.manifest, tenant, checked, report):
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
    checked: set[bytes],
    report: VerifyReport,
) -> Iterator[None]:
    """Yields after each file that was read."""
    session, _ = manifests.session_of(remote, manifest)
    report.checked += 1
    root = root_of_session(session, tenant)
    check_names(manifest, session, root)
    wanted = wanted_files(manifest, session, root)

    def check(item: Item) -> KvsnapError | None:
        try:
            _check(remote, manifest, root, item, wanted.get(item.name))
        except (NotFound, Damaged, Unsupported) as error:
            return error
        return None

    for item in manifest.of_kind(CALIBRATION):  # no block can be decoded without
        if item.name not in checked:
            yield from _told(item, check(item), manifest, checked, report)
    rest = manifest.of_kind(BLOCK) + manifest.of_kind(STATE)
    unread = [item for item in rest if item.name not in checked]
    at_once = at_once_of(layout_of(root.identity).in_blocks.size(manifest.block_size))
    for item, error in in_order(check, unread, at_once):
        yield from _told(item, error, manifest, checked, report)


def _told(
    item: Item,
    error: KvsnapError | None,
    manifest: Manifest,
    checked: set[bytes],
    report: VerifyReport,
) -> Iterator[None]:
    checked.add(item.name)
    report.checked += 1
    if error is not None:
        report.bad.append(Bad(item.name.hex(), manifest.item_key(item), error.what))
    yield


def _check(
    remote: Remote, manifest: Manifest, root: Root, item: Item, wanted: Wanted | None
) -> None:
    most = min(item.size, MOST_CALIBRATION)
    if wanted is not None:
        most = longest_block(wanted, layout_of(root.identity))
    data = memoryview(remote.get(manifest.item_key(item), most).data)
    check_header(data)
    if wanted is not None:
        check_foreign(root, wanted, data, item.content.hex())
        return
    calibration = parse_calibration(data)
    if calibration.digest != item.name.hex():
        raise Damaged("the file holds another calibration than its name says")
    register(calibration)
