"""Pull a session: what this store lacks comes here, each file checked, then the session.

Nothing that a remote says is believed. Names are computed from the session's own token ids under the
root of its identity and the key at hand; each file is compared with what that asks for, with its
digests, and its rows are decoded once before it counts. What is damaged there, or gone, makes the
session shorter: resuming it computes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import (
    Damaged,
    Diverged,
    KvsnapError,
    NotAllStored,
    NotFound,
    PartlyDone,
    StoreFull,
    Unsupported,
    Vanished,
)
from kvsnap.formats.identity import EXACT, Root, layout_of
from kvsnap.formats.manifest import BLOCK, CALIBRATION, STATE, Item, content_of
from kvsnap.formats.names import ZERO_PARENT
from kvsnap.formats.session_name import check_session_name
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.foreign import Foreign
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.sessions import Draft
from kvsnap.kvstore.sharing.checks import wanted_files
from kvsnap.kvstore.sharing.fetch import fetch_block, fetch_calibration
from kvsnap.kvstore.sharing.manifests import bring_again
from kvsnap.kvstore.sharing.pull_plan import PullPlan, plan_pull
from kvsnap.kvstore.sharing.push import Progress
from kvsnap.kvstore.sharing.transfer import at_once_of, in_order
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

_NO_PARENT = "the block before it is missing"


@dataclass(frozen=True, kw_only=True)
class PullReport:
    """What came, or would; `files` and `bytes` are all but the session's own file, which comes with
    the plan. `stored_blocks` of the chain's `blocks` are here now."""

    session: str
    remote: str
    files: int
    moved_files: int
    moved_bytes: int
    bytes: int
    blocks: int
    stored_blocks: int
    dry_run: bool
    seconds: float


@dataclass
class _Arrived:
    files: int = 0
    bytes: int = 0
    lost: list[str] = field(default_factory=list)
    """Why files that the manifest names cannot be had."""
    full: StoreFull | None = None


def pull(
    store: Store,
    remote: Remote,
    name: str,
    *,
    tenant: Tenant | None = None,
    new_name: str | None = None,
    force: bool = False,
    dry_run: bool = False,
    show: Callable[[PullPlan], None] = lambda plan: None,
    progress: Progress = lambda done, total: None,
) -> PullReport:
    """Make a store hold a session of a remote, under its name or `new_name`.

    Raises `NotFound`, `Damaged`, `Diverged` (unless `force`), `Unsupported` where its blocks have
    another size than this store's, `UsageError` for a wrong tenant key, `RemoteError`; `PartlyDone`
    with the report where blocks were damaged or missing there, or did not fit here.
    """
    if new_name is not None:
        check_session_name(new_name)
    started = time.monotonic()

    def once() -> PullReport:
        plan = plan_pull(store, remote, name, tenant=tenant, new_name=new_name, force=force)
        show(plan)
        came = _Arrived()
        if dry_run:
            came.files, came.bytes = len(plan.missing), plan.bytes
        else:
            _apply(store, remote, plan, came, progress)
        chain = plan.session.record.chain
        report = PullReport(
            session=plan.session.record.name,
            remote=remote.url,
            files=plan.files,
            moved_files=came.files,
            moved_bytes=came.bytes,
            bytes=plan.manifest.size - plan.manifest.session.size,
            blocks=len(chain),
            stored_blocks=store.index.depth(chain),
            dry_run=dry_run,
            seconds=time.monotonic() - started,
        )
        _raise_partly(report, came)
        return report

    return try_again(once)


def _apply(
    store: Store, remote: Remote, plan: PullPlan, came: _Arrived, progress: Progress
) -> None:
    record = plan.session.record
    with store.holds.lease() as lease, store.sessions.draft_of(record, plan.packed) as draft:
        try:
            _fetch(store, remote, plan, lease, came, progress)
        except StoreFull as full:
            came.full = full
        reachable = store.index.is_reachable
        store.sync(record.chain[: store.index.depth(record.chain)])
        states = [item.name for item in plan.manifest.of_kind(STATE)]
        store.sync([name for name in states if reachable(name)])
        if not plan.same and not _publish(store, draft, plan):
            raise Diverged(
                f"session {record.name!r} was saved here meanwhile", "pull again, or with --as"
            )
        store.sessions.sync(record)
    store.index.write_notes()


def _publish(store: Store, draft: Draft, plan: PullPlan) -> bool:
    """Whether the session is what was pulled now; another pull of the same may have been faster."""
    record = plan.session.record
    if store.sessions.publish(draft, plan.started_from) is not None:
        return True
    return store.sessions.version(record.tenant_id, record.name)[1] == plan.packed.file_digest


def _fetch(
    store: Store,
    remote: Remote,
    plan: PullPlan,
    lease: Lease,
    came: _Arrived,
    progress: Progress,
) -> None:
    layout = layout_of(plan.root.identity)
    wanted = wanted_files(plan.manifest, plan.session, plan.root)
    total, done = plan.bytes, 0
    progress(0, total)

    def arrived(item: Item, lost: str | None, size: int) -> None:
        nonlocal done
        done += item.size
        progress(done, total)
        if lost is None:
            came.files, came.bytes = came.files + 1, came.bytes + size
        else:
            came.lost.append(f"{item.kind} {item.name.hex()[:12]}: {lost}")

    chain = plan.session.record.chain
    depth = store.index.depth(chain)
    if depth and not lease.keep(chain[depth - 1]):
        raise Vanished("a block was evicted before it could be leased", "pull again")
    for item in plan.missing:
        if item.kind == CALIBRATION:
            try:
                store.calibrations.put(fetch_calibration(remote, plan.manifest, item))
                arrived(item, None, item.size)
            except (NotFound, Damaged, Unsupported) as error:
                arrived(item, error.what, 0)
    if plan.root.fidelity != EXACT:
        with suppress(Unsupported):  # then no block can be checked, each for this reason
            store.calibrations.prepare(get_codec(plan.root.fidelity))
    cut = False

    def get(item: Item) -> Foreign | KvsnapError:
        if cut and item.kind == BLOCK:
            return Damaged(_NO_PARENT)
        try:
            own, content = wanted[item.name], content_of(item)
            sealed = plan.manifest.sealed
            return fetch_block(remote, store.opener, plan.root, own, layout, content, sealed=sealed)
        except (NotFound, Damaged, Unsupported) as error:
            return error

    order = [item for item in plan.missing if item.kind in (BLOCK, STATE)]
    at_once = at_once_of(layout.in_blocks.size(plan.manifest.block_size))
    with closing(in_order(get, order, at_once)) as arriving:
        for item, found in arriving:
            lost = _adopt(store, plan.root, wanted[item.name], found, lease)
            cut = cut or (lost is not None and item.kind == BLOCK)
            arrived(item, lost, 0 if isinstance(found, KvsnapError) else found.packed.size)


def _adopt(
    store: Store, root: Root, wanted: Wanted, found: Foreign | KvsnapError, lease: Lease
) -> str | None:
    """The same for a block or checkpoint that was fetched and checked, or was not."""
    if isinstance(found, KvsnapError):
        return found.what
    if wanted.parent != ZERO_PARENT and not store.index.is_reachable(wanted.parent):
        return _NO_PARENT
    store.blocks.adopt(root, wanted, found, lease)
    return None


def _raise_partly(report: PullReport, came: _Arrived) -> None:
    error: PartlyDone
    if came.full is not None:
        error = NotAllStored(report.stored_blocks, report.blocks, came.full)
    elif came.lost:
        several = f" and {len(came.lost) - 1} after it" if len(came.lost) > 1 else ""
        error = PartlyDone(
            f"{report.remote}: {came.lost[0]}; this file{several} of {report.session!r} cannot be"
            " used, resuming computes what they hold",
            bring_again(report.remote),
        )
    elif report.stored_blocks < report.blocks and not report.dry_run:
        error = PartlyDone(
            f"{report.remote} has the front of {report.session!r}, {report.stored_blocks} of"
            f" {report.blocks} blocks; resuming computes the rest",
            "resume and save the session, then push it",
        )
    else:
        return
    error.report = report
    raise error
