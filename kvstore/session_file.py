"""One session file, and the pin of one: read with every check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Sealed
from kvsnap.formats.pin import PinRecord, parse_pin
from kvsnap.formats.sealed import Clear, is_sealed, parse_sealed
from kvsnap.formats.session import KIND, SessionFile, SessionRecord, parse_session
from kvsnap.kvstore import files
from kvsnap.kvstore.keyring import Keyring


def read_session(path: Path, keys: Keyring, *, strict: bool = False) -> SessionFile:
    """Read and check a session file. Unless `strict`, damage to the tail's rows alone passes:
    `tail_rows` will find it, and the conversation itself is whole. (Of a sealed file all or nothing
    can be read.) Raises `Sealed` where its tenant's key is not at hand."""
    buffer = files.read_whole(path)
    if is_sealed(buffer):
        return open_session(buffer, keys, path.parent.name)
    try:
        check_file_digest(buffer)
    except Damaged:
        if strict:
            raise
        try:
            session = parse_session(buffer)
            session.check_talk()
        except KvsnapError:
            session = None
        if session is None:
            raise
        return session
    return parse_session(buffer)


def open_session(buffer: memoryview, keys: Keyring, tenant_id: str | None = None) -> SessionFile:
    """A sealed session file. `tenant_id`: whose it has to be, where that is known. Raises as
    `read_session`."""
    check_file_digest(buffer)
    sealed = parse_sealed(buffer)
    if sealed.clear.kind != KIND:
        raise Damaged(f"a sealed {sealed.clear.kind} where a session belongs")
    if tenant_id not in (None, sealed.clear.tenant_id):
        raise Damaged("the file is sealed by another tenant's key")
    session = parse_session(sealed.open(keys.get(sealed.clear.tenant_id)))
    if clear_of_session(session.record) != sealed.clear:
        raise Damaged("the sealed file holds another session than it says")
    return replace(session, sealed=True)


def clear_of_session(record: SessionRecord) -> Clear:
    """What stands in the clear around a session's file."""
    last = record.path[-1] if record.path else b""
    return Clear(KIND, record.tenant_id, root_id=record.root_id, last=last)


def stands_on(path: Path, keys: Keyring) -> tuple[bytes, ...]:
    """The stored files that a session stands on, in order; of one that cannot be opened the last."""
    try:
        return read_session(path, keys).record.path
    except Sealed:
        last = parse_sealed(files.read_whole(path)).clear.last
        return (last,) if last else ()


def read_pin(path: Path) -> PinRecord:
    """A pin's file. Raises `Damaged`, `Unsupported` or OSError."""
    buffer = files.read_whole(path)
    check_file_digest(buffer)
    return parse_pin(buffer)


def no_session(name: str) -> NotFound:
    return NotFound(
        f"no session {name!r} in the store", "kvsnap ls shows the sessions that are there"
    )
