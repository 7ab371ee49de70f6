"""Check files, down to the decoded rows, and say what is wrong. Nothing is moved or mended here.

A block is also wrong where its name does not follow from its own record: without a tenant's key
that can be computed from the identity in the file; with one, the key must be given.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import Damaged, KvsnapError, Sealed
from kvsnap.formats.identity import parse_identity, root_behind
from kvsnap.formats.names import block_name, chain_names
from kvsnap.formats.sealed import is_sealed, parse_sealed
from kvsnap.formats.session import SessionFile, SessionRecord
from kvsnap.formats.session_name import SUFFIX
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore import files
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.match import state_at_end
from kvsnap.kvstore.rebuild import MISSING, block_paths
from kvsnap.kvstore.session_file import read_session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_blocks import own_blocks

_BLOCK = re.compile(rf"[0-9a-f]{{64}}{SUFFIX}")
"""What is not called so is not ours: `doctor` tells of it."""


@dataclass(frozen=True)
class Bad:
    """One finding. `name`: a block's name, a session's name, or the file's."""

    name: str
    path: str
    reason: str


@dataclass
class VerifyReport:
    """`unreachable`: intact blocks that nothing can use until the one before them is back.
    `evicted`: blocks of the session that was asked for which are not in the store (any more);
    resuming it computes and stores them again. `sealed`: files of tenants whose key was not given;
    of these the digest was checked, and what stands in the clear."""

    checked: int = 0
    bad: list[Bad] = field(default_factory=list)
    unreachable: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)
    sealed: int = 0


def verify_store(
    store: Store,
    tenant: Tenant | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VerifyReport:
    """Every file where blocks and sessions stand, and every row of the index; with a tenant's key the
    sessions and blocks that are stored under it, as far as the index has them."""
    report = VerifyReport()
    store.keys.add(tenant)
    if store.problem:
        report.bad.append(Bad(store.place.settings.name, str(store.place.settings), store.problem))
    of, query = own_blocks(store, tenant), store.index.query
    if tenant is None:
        paths = [path for path in block_paths(store.place) if _BLOCK.fullmatch(path.name)]
    else:
        named = query(f"SELECT name FROM blocks WHERE lost IS NULL AND {of} ORDER BY name")
        paths = [store.place.block(name) for (name,) in named]
    sessions = list(_session_paths(store, tenant.tenant_id if tenant is not None else "*"))
    for number, path in enumerate(paths):
        _block_file(store, path, tenant, report)
        progress(number + 1, len(paths) + len(sessions))
    for number, path in enumerate(sessions):
        session = _session_file(store, path, tenant, report)
        if (
            session is not None
            and store.sessions.path(session.record.tenant_id, session.record.name) != path
        ):
            reason = "the file stands under another session's name"
            report.bad.append(Bad(session.record.name, str(path), reason))
        progress(len(paths) + number + 1, len(paths) + len(sessions))
    if tenant is None:  # calibrations are nobody's own: they say how a model's rows are coded
        report.checked += len(files.sizes(store.place.calibrations))
        for path, reason in store.calibrations.check():
            report.bad.append(Bad(path.name.removesuffix(SUFFIX), str(path), reason))
    known = {bad.path for bad in report.bad}
    find = store.index.find
    for name, lost in query(f"SELECT name, lost FROM blocks WHERE lost IS NOT NULL AND {of}"):
        place = str(store.place.block(name))
        if place not in known:
            report.bad.append(Bad(name.hex(), place, lost))
    for name, size in query(f"SELECT name, bytes FROM blocks WHERE lost IS NULL AND {of}"):
        place = str(store.place.block(name))
        if place not in known and files.file_size(Path(place)) is None and find(name) is not None:
            report.bad.append(Bad(name.hex(), place, f"the file of {size} bytes is missing"))
    waiting = (
        f"SELECT name FROM blocks WHERE reachable = 0 AND lost IS NULL AND {of} ORDER BY start"
    )
    report.unreachable = [name.hex() for (name,) in query(waiting)]
    return report


def verify_session(
    store: Store, tenant_id: str, name: str, tenant: Tenant | None = None
) -> VerifyReport:
    """One session and the blocks of its chain. Raises `NotFound`."""
    report = VerifyReport()
    store.keys.add(tenant)
    path = store.sessions.require(tenant_id, name)
    session = _session_file(store, path, tenant, report)
    for block in session.record.path if session else ():
        file = store.place.block(block)
        row = store.index.find(block)
        if row is None and files.file_size(file) is None:
            report.evicted.append(block.hex())
        elif files.file_size(file) is None:
            row = store.index.find(block)
            lost = row.lost if row is not None and row.lost else MISSING
            report.bad.append(Bad(block.hex(), str(file), lost))
        else:
            _block_file(store, file, tenant, report)
            if row is not None and not row.reachable:
                report.unreachable.append(block.hex())
    return report


@contextlib.contextmanager
def _finding(path: Path, report: VerifyReport) -> Iterator[None]:
    """Count one file as checked; what the block raises is what is wrong with it."""
    report.checked += 1
    try:
        yield
    except Sealed:
        report.sealed += 1
    except FileNotFoundError:
        report.checked -= 1  # evicted, removed or replaced meanwhile; rows are looked at as well
    except KvsnapError as error:
        report.bad.append(Bad(path.name.removesuffix(SUFFIX), str(path), error.what))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        report.bad.append(Bad(path.name.removesuffix(SUFFIX), str(path), reason))


def _block_file(store: Store, path: Path, tenant: Tenant | None, report: VerifyReport) -> None:
    with _finding(path, report):
        buffer = files.read_whole(path)
        if is_sealed(buffer) and store.place.block(parse_sealed(buffer).clear.name) != path:
            raise Damaged("the sealed file is another block's")
        block = store.opener.block(buffer, tenant.tenant_id if tenant is not None else None)
        store.calibrations.prepare(block.codec)
        block.check_content()
        record = block.record
        if store.place.block(record.name) != path:
            raise Damaged(f"the file holds block {record.name.hex()[:12]}…")
        _check_fidelity(record)
        root = root_behind(record.identity, record.root_id, tenant)
        if root is not None:
            own = block_name(root.key, record.parent, record.token_ids, record.extras)
            if own != record.name:
                raise Damaged("the block's name does not follow from its token ids and identity")
        _compare_row(store, record, len(buffer))


def _compare_row(store: Store, record: BlockRecord, size: int) -> None:
    row = store.index.find(record.name)
    if row is None:
        return  # of a process that died before its row: the next writer deletes it, or gc adds it
    if files.file_size(store.place.block(record.name)) != size:
        return  # stored again, in another form, while it was read here
    ids = b"" if row.sealed else big_endian(record.token_ids)
    told = (row.state, row.start, row.tokens, row.length, row.bytes)
    if told != (record.is_state, record.start, ids, len(record.token_ids), size):
        raise Damaged("the index differs from the file: delete index.sqlite3*, it is built anew")


def _session_file(
    store: Store, path: Path, tenant: Tenant | None, report: VerifyReport
) -> SessionFile | None:
    with _finding(path, report):
        session = read_session(path, store.opener.keys, strict=True)
        store.sessions.tail_rows(session)
        session.check_talk()
        record = session.record
        _check_fidelity(record)
        root = root_behind(record.identity, record.root_id, tenant)
        if root is not None:
            names = chain_names(root.key, record.token_ids, record.block_size)
            if tuple(names) != record.chain:
                raise Damaged("the chain does not follow from the session's token ids")
            state = state_at_end(root.key, names, record.token_ids, record.block_size)
            if record.state not in (b"", state.name):
                raise Damaged("the state checkpoint does not follow from the session's token ids")
        return session
    return None


def _check_fidelity(record: BlockRecord | SessionRecord) -> None:
    if parse_identity(record.identity).get("fidelity") != record.fidelity:
        raise Damaged("the file's fidelity is not that of its identity")


def _session_paths(store: Store, tenant: str) -> Iterator[Path]:
    yield from sorted(store.place.sessions.glob(f"{tenant}/*{SUFFIX}"))
