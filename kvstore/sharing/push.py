"""Push a session: what the remote lacks goes there, then the manifest that names it all.

A reader elsewhere sees the session whole or not at all. Blocks go in chain order, so that what an
interrupted push leaves is a prefix but for the last few, and the next push finds its end by
galloping. What was taken for present is looked at again when the manifest is up: a sweep of the
remote may have met it in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from kvsnap.formats.container import described_size, joined
from kvsnap.formats.errors import (
    Damaged,
    Diverged,
    PartlyDone,
    RemoteError,
    Unsupported,
    Untrusted,
    Vanished,
)
from kvsnap.formats.manifest import (
    CALIBRATION,
    SESSION,
    Item,
    Manifest,
    block_key,
    pack_manifest,
)
from kvsnap.formats.session import SessionFile
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.sharing.checks import MOST_HEADER, check_header
from kvsnap.kvstore.sharing.contents import items_of_chain, states_of
from kvsnap.kvstore.sharing.local_files import check_notes, path_of, read_local
from kvsnap.kvstore.sharing.push_plan import (
    PushPlan,
    missing_blocks,
    plan_push,
    unsigned_there,
)
from kvsnap.kvstore.sharing.sealing import seal_manifest, sealed_item
from kvsnap.kvstore.sharing.shared import refuse_sharing
from kvsnap.kvstore.sharing.sweep_mark import wait_for_sweep
from kvsnap.kvstore.sharing.transfer import AT_ONCE, in_order
from kvsnap.kvstore.signing import sign_blocks, sign_session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust import Trust

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True, kw_only=True)
class PushReport:
    """What moved, or would. `files` and `bytes` count all but the manifest."""

    session: str
    remote: str
    files: int
    moved_files: int
    moved_bytes: int
    bytes: int
    blocks: int
    evicted_blocks: int
    dry_run: bool
    seconds: float


def push(
    store: Store,
    remote: Remote,
    tenant_id: str,
    name: str,
    *,
    force: bool = False,
    known: Container[bytes] = (),
    dry_run: bool = False,
    sign: bool = False,
    encrypt: bool = False,
    show: Callable[[PushPlan], None] = lambda plan: None,
    progress: Progress = lambda done, total: None,
) -> PushReport:
    """Make a remote hold a stored session. Raises `NotFound`, `Diverged` (unless `force`), `Damaged`
    for a damaged file of this store, `RemoteError`; `PartlyDone` where blocks of its end were
    evicted here. An interrupted push is taken up by the next.

    `force` replaces whatever stands there, and sends every file anew: one that is damaged there has
    the right length. `known`: file digests of versions of the session that this one replaced here,
    and so may replace there.

    `sign` (a store with a trust list always does): what nobody trusted signed is signed here first,
    the session as its next revision; a block that is there counts only if it holds these rows and a
    trusted key signed them.

    `encrypt` (an encrypted store always does): all goes there sealed by the tenant's key, and what is
    there unsealed is replaced. Raises `UsageError` where the key is not at hand, and where other
    tenants' sessions are in the remote and this would go there for all to read.
    """
    started = time.monotonic()
    if not remote.abilities.write:
        raise Unsupported(
            f"{remote.url} can only be read", "push to the folder or bucket behind it"
        )

    trust = store.trust or (Trust({}) if sign else None)
    encrypt = encrypt or store.encrypt

    def once() -> PushReport:
        with store.holds.lease() as lease:
            session = store.sessions.load(tenant_id, name)
            _lease(store, session, lease.keep)
            if trust is not None and not dry_run:
                session = _sign(store, session, trust)
            check_notes(store, session)
            plan = plan_push(
                store, remote, session, force=force, known=known, trust=trust, encrypt=encrypt
            )
            if trust is not None and not dry_run:
                plan = replace(plan, manifest=plan.manifest.sign(trust.key))
            if plan.tenant is None and plan.replaces is None:
                refuse_sharing(remote, tenant_id)
            show(plan)
            moved = [] if dry_run else _apply(store, remote, plan, session, progress)
            planned = plan.missing if dry_run else moved
            return PushReport(
                session=name,
                remote=remote.url,
                files=plan.files,
                moved_files=len(planned),
                moved_bytes=sum(item.size for item in planned),
                bytes=plan.manifest.size,
                blocks=plan.blocks,
                evicted_blocks=plan.evicted,
                dry_run=dry_run,
                seconds=time.monotonic() - started,
            )

    report = try_again(once)
    if report.evicted_blocks:
        error = PartlyDone(
            f"{report.evicted_blocks} of {report.blocks} blocks were evicted here and are not in"
            f" {remote.url}; whoever takes {name!r} from there computes them",
            "resume and save the session, then do this again",
        )
        error.report = report
        raise error
    return report


def push_chain(store: Store, remote: Remote, names: Sequence[bytes]) -> int:
    """Send what a remote lacks of blocks that no session names; how many those were. Blocks that
    went from here meanwhile end it."""
    items = items_of_chain(store, names)
    if not items:
        return 0
    if store.trust is None and not store.encrypt:
        missing = missing_blocks(remote, items)
    elif store.trust is None:
        sizes = in_order(lambda item: remote.size(block_key(item.name)), items)
        missing = [item for item, size in sizes if size != item.size]
    else:
        try:
            root_id = read_record(store.place.block(names[0])).record.root_id
        except (OSError, Damaged) as error:
            raise Vanished("a block went from the store while it was sent", "push again") from error
        missing = unsigned_there(remote, items, root_id, store.trust)

    def send(item: Item) -> None:
        remote.put(block_key(item.name), read_local(store, item, store.place.block(item.name)))

    return sum(1 for _ in in_order(send, missing))


def _sign(store: Store, session: SessionFile, trust: Trust) -> SessionFile:
    """The session, signed, and so what is stored of it. In a store with a trust list nothing is signed
    afterwards: what nobody trusted signed is set aside."""
    chain = session.record.chain
    names = [*chain, *states_of(store, session, chain[: store.index.depth(chain)])]
    if store.trust is None:
        sign_blocks(store, names, trust)
        return sign_session(store, session, trust)
    for name in names:
        store.blocks.has(name)
    try:
        trust.check_session(session)
    except Untrusted as error:
        raise Untrusted(
            f"session {session.record.name!r}: {error.what}, as this store asks for",
            "resume and save it here, then push it",
        ) from error
    return session


def _apply(
    store: Store,
    remote: Remote,
    plan: PushPlan,
    session: SessionFile,
    progress: Progress,
) -> Sequence[Item]:
    manifest, total, done = plan.manifest, plan.bytes, 0
    tenant = plan.tenant
    progress(0, total)

    def send(item: Item) -> None:
        data = read_local(store, item, path_of(store, manifest, item))
        if tenant is not None:
            data = joined(sealed_item(item, data, session, tenant))
        remote.put(manifest.item_key(item), data)

    at_once = 1 if remote.abilities.in_turn else AT_ONCE
    for item, _ in in_order(send, plan.missing, at_once):
        done += item.size
        progress(done, total)
    if not plan.unchanged:
        _put_manifest(remote, plan)
    for key in plan.instead:  # not before: there must be no moment without the session
        remote.delete(key)
    moved = {item.name: item for item in plan.missing}
    wait_for_sweep(remote)
    lacking = _not_there(remote, manifest, manifest.items)
    for item, _ in in_order(send, lacking):
        moved[item.name] = item
    if lacking and (left := _not_there(remote, manifest, lacking)):
        raise RemoteError(
            f"{plan.url} took {len(left)} files and does not have them",
            f"look at the remote's own log; the first is {manifest.item_key(left[0])}",
        )
    return list(moved.values())


def _put_manifest(remote: Remote, plan: PushPlan) -> None:
    manifest, tenant = plan.manifest, plan.tenant
    packed = pack_manifest(manifest) if tenant is None else seal_manifest(manifest, tenant)
    data = joined(packed)
    check_header(data)
    replaces = plan.replaces
    if replaces == "":
        remote.delete(plan.key)
        replaces = None
    if not remote.replace(plan.key, data, replaces):
        raise Diverged(
            f"somebody else pushed {plan.manifest.name!r} to {plan.url} meanwhile",
            "push again: what moved stays there",
        )


def _not_there(remote: Remote, manifest: Manifest, items: Sequence[Item]) -> list[Item]:
    """Files that are missing, or that are not what the manifest says."""

    def check(item: Item) -> bool:
        key = manifest.item_key(item)
        size = remote.size(key)
        if size == item.size:
            return True
        return size is not None and _holds_the_same(remote, manifest, item, size)

    return [item for item, found in in_order(check, items) if not found]


def _holds_the_same(remote: Remote, manifest: Manifest, item: Item, size: int) -> bool:
    """Whether a block of another length holds the same rows, in another lossless coding; or is sealed,
    as another session's push left it."""
    if item.kind in (SESSION, CALIBRATION):
        return False
    head = remote.get_start(manifest.item_key(item), MOST_HEADER)
    try:
        if described_size(head) != size:
            return False
    except Damaged:
        return False
    if b'"kind":"sealed"' in head:
        return b'"name":"' + item.name.hex().encode() + b'"' in head
    return not manifest.sealed and b'"content":"' + item.content.hex().encode() + b'"' in head


def _lease(store: Store, session: SessionFile, keep: Callable[[bytes], bool]) -> None:
    chain = session.record.path
    depth = store.index.depth(chain)
    if depth and not keep(chain[depth - 1]):
        raise Vanished("a block was evicted before it could be leased", "push again")
