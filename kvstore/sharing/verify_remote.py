"""Check a remote's sessions and the files that they name, down to the decoded rows. Nothing is moved
or mended: pushing again from where a session is whole replaces what is bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvsnap.formats.block import parse_block
from kvsnap.formats.codecs.calibration import parse_calibration, register
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Unsupported, UsageError
from kvsnap.formats.identity import Root, layout_of
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Item, Manifest
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.blocks import Wanted
from kvsnap.kvstore.compare import difference
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.checks import (
    check_header,
    check_names,
    longest,
    root_of_session,
    wanted_files,
)
from kvsnap.kvstore.sharing.transfer import in_order
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
    wanted, layout = wanted_files(manifest, session, root), layout_of(root.identity)

    def get(item: Item) -> memoryview | KvsnapError:
        try:
            limit = longest(item, wanted.get(item.name), layout)
            return memoryview(remote.get(manifest.item_key(item), limit).data)
        except (NotFound, Damaged) as error:
            return error

    order = manifest.of_kind(CALIBRATION) + manifest.of_kind(BLOCK) + manifest.of_kind(STATE)
    for item, data in in_order(get, [item for item in order if item.name not in checked]):
        checked.add(item.name)
        report.checked += 1
        try:
            _check(root, item, wanted.get(item.name), data)
        except (NotFound, Damaged, Unsupported) as error:
            report.bad.append(Bad(item.name.hex(), manifest.item_key(item), error.what))
        yield


def _check(root: Root, item: Item, wanted: Wanted | None, data: memoryview | KvsnapError) -> None:
    if isinstance(data, KvsnapError):
        raise data
    check_header(data)
    if wanted is None:
        calibration = parse_calibration(data)
        if calibration.digest != item.name.hex():
            raise Damaged("the file holds another calibration than its name says")
        register(calibration)
        return
    check_file_digest(data)
    block = parse_block(data)
    found = difference(block.record, root, wanted)
    if found is not None:
        raise Damaged(found)
    block.check_content()
    if block.content != item.content.hex():
        raise Damaged("its rows are not those that the manifest names")
