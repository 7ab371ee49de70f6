"""A session's files in this store, read whole and checked before they go anywhere."""

from __future__ import annotations

from pathlib import Path

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, Unsupported, Vanished
from kvsnap.formats.manifest import BLOCK, CALIBRATION, SESSION, STATE, Item, Manifest
from kvsnap.formats.sealed import is_sealed
from kvsnap.formats.session import SessionFile
from kvsnap.kvstore import files
from kvsnap.kvstore.session_file import open_session
from kvsnap.kvstore.sharing.checks import MOST_SESSION_HEADER, check_header
from kvsnap.kvstore.store import Store


def path_of(store: Store, manifest: Manifest, item: Item) -> Path:
    if item.kind == SESSION:
        return store.sessions.path(manifest.tenant_id, manifest.name)
    if item.kind == CALIBRATION:
        return store.calibrations.path(item.name.hex())
    return store.place.block(item.name)


def read_local(store: Store, item: Item, path: Path) -> memoryview:
    """An item's bytes, checked."""
    changed = Vanished(f"{path.name} changed while it was pushed", "push again")
    block = None
    try:
        buffer = files.read_whole(path)
        if item.kind in (BLOCK, STATE):
            block = store.opener.block(buffer)
        if block is not None:
            found = block.file_digest
        elif item.kind == SESSION and is_sealed(buffer):
            found = open_session(buffer, store.keys).file_digest
        else:
            found = check_file_digest(buffer)
    except FileNotFoundError:
        raise changed from None
    except OSError as error:
        raise files.store_error(error, path, "read") from error
    except Damaged as error:
        if item.kind in (BLOCK, STATE):
            store.blocks.set_aside(item.name, error.what)
        raise Damaged(
            f"{path.name} is damaged here: {error.what}",
            "resume and save the session again, then push: the block is computed anew",
        ) from error
    if found != item.file.hex():
        raise changed  # saved anew, or in another codec
    if block is not None and block.record.name != item.name:
        raise Damaged(f"{path.name} holds another block", "kvsnap verify shows more")
    return buffer


def check_notes(store: Store, session: SessionFile) -> None:
    """Raise `Unsupported` for a session whose notes nobody would take from a remote."""
    path = store.sessions.path(session.record.tenant_id, session.record.name)
    try:
        check_header(files.read_whole(path), MOST_SESSION_HEADER)
    except OSError as error:
        raise files.store_error(error, path, "read") from error
    except Damaged as error:
        raise Unsupported(
            f"the session's notes are too long for a remote: {error.what}",
            "save the session with shorter notes",
        ) from error
