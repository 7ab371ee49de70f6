"""Session files: load, replace by revision, list, remove."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import Packed
from kvsnap.formats.errors import (
    Damaged,
    NotFound,
    Sealed,
    SessionMoved,
    StoreError,
    StoreFull,
    Unsupported,
    Vanished,
)
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.pin import pack_pin
from kvsnap.formats.sealed import seal, sealed_name
from kvsnap.formats.session import SessionFile, SessionRecord, pack_session, parse_session
from kvsnap.formats.session_name import SUFFIX, session_file_name
from kvsnap.formats.tenant import NO_TENANT_ID
from kvsnap.kvstore import files
from kvsnap.kvstore.holds import end_pin, follow_pin, pin_key, rename_pin
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.locks import one_at_a_time
from kvsnap.kvstore.opener import UNSEALED, Opener
from kvsnap.kvstore.place import Place, read_settings
from kvsnap.kvstore.session_file import clear_of_session, no_session, read_pin, read_session
from kvsnap.kvstore.session_list import count_session, forget_session, note_session
from kvsnap.kvstore.space import Room, Space

_SAVE_AGAIN = "save its prompt again: blocks that are stored are reused"

Version = tuple[int, str]
"""(revision, file digest) of a session file."""


@dataclass(frozen=True)
class Draft:
    """A session file that is written and not published."""

    record: SessionRecord
    packed: Packed
    """The plain file."""
    room: Room
    size: int
    """Of the file as it is stored."""


class Sessions:
    """The sessions of one store. A save replaces only the revision that it started from."""

    def __init__(
        self,
        place: Place,
        index: Index,
        space: Space,
        opener: Opener | None = None,
    ) -> None:
        self.place, self.index, self.space = place, index, space
        opener = opener or Opener()
        self.trust, self.keys = opener.trust, opener.keys

    def path(self, tenant_id: str, name: str) -> Path:
        """Where a session of that name stands, or would."""
        paths = self._paths(tenant_id, name)
        return next((path for path in paths if files.stands(path)), paths[0])

    def _paths(self, tenant_id: str, name: str) -> list[Path]:
        """Where it can stand, first where this store writes it. A sealed session's name cannot be
        told from its file's."""
        folder = self.place.sessions / tenant_id
        plain, tenant = folder / session_file_name(name), self.keys.get(tenant_id)
        if tenant is None:
            return [plain]
        sealed = folder / f"{sealed_name(tenant, name)}{SUFFIX}"
        return [sealed, plain] if self.keys.seals else [plain, sealed]

    def load(self, tenant_id: str, name: str) -> SessionFile:
        """Read and check one session. Raises `NotFound`, or `Damaged` with the file left alone."""
        path = self.path(tenant_id, name)
        try:
            found = read_session(path, self.keys)
        except (FileNotFoundError, NotADirectoryError):
            raise no_session(name) from None
        except OSError as error:
            raise files.store_error(error, path, "read") from error
        except (Damaged, Sealed) as error:
            # Sealed: the file stands where only this tenant's can, and is another's by what it says.
            raise Damaged(f"session {name!r} is damaged: {error.what}", _SAVE_AGAIN) from error
        if found.record.name != name or found.record.tenant_id != tenant_id:
            raise Damaged(
                f"session {name!r} is damaged: its file holds {found.record.name!r}", _SAVE_AGAIN
            )
        return found

    def tail_rows(self, session: SessionFile) -> dict[str, np.ndarray]:
        """The rows of a session's tail (there may be none), checked. Raises `Damaged`, also where nobody whom this store
        trusts signed them, and in an encrypted one where they are not sealed: the conversation can be
        read nevertheless."""
        keyed = session.record.tenant_id != NO_TENANT_ID
        if session.record.tail_tokens and self.keys.seals and keyed and not session.sealed:
            raise Damaged(UNSEALED)  # as of blocks: anyone can have written it
        if self.trust is not None:
            self.trust.check_session(session)
        return session.tail_rows()

    def version(self, tenant_id: str, name: str) -> Version:
        """What stands under a name; (0, "") for nothing, or for a damaged file to replace."""
        try:
            found = self.load(tenant_id, name)
        except (NotFound, Damaged):
            return 0, ""
        return found.record.revision, found.file_digest

    @contextlib.contextmanager
    def draft(
        self, record: SessionRecord, codec: Codec, layout: Layout, tail: Rows
    ) -> Iterator[Draft]:
        """Write a session file to tmp/, to be published when its blocks are stored: it must not be
        they that take its room. Raises `StoreFull` where there is none."""
        key = self.trust.key if self.trust is not None else None
        with self.draft_of(record, pack_session(record, codec, layout, tail, key)) as draft:
            yield draft

    @contextlib.contextmanager
    def draft_of(self, record: SessionRecord, packed: Packed) -> Iterator[Draft]:
        """The same of a file that is packed already, its bytes as they are."""
        stored = packed
        if self.keys.seals:
            stored = seal(packed, clear_of_session(record), self.keys.require(record.tenant_id))
        with self.space.write(stored) as room:
            yield Draft(record, packed, room, stored.size)

    def publish(self, draft: Draft, started_from: Version) -> SessionFile | None:
        """Let a draft, synced first, replace what its save started from; `sync` makes that durable.

        Returns the file as it was written, never read back; None where something else stands there.
        The whole file that a save started from is compared, not its revision alone: a session can
        be removed and saved anew, or an older file put back. A damaged one goes to quarantine. Raises
        `Vanished` where the store has become an encrypted one: the draft is not sealed.
        """
        record, room = draft.record, draft.room
        paths = self._paths(record.tenant_id, record.name)
        path = paths[0]
        files.make_dir(path.parent)
        files.sync_all([room.path])
        with files.store_errors(room.path):
            inode = room.path.stat().st_ino
        # The folder's lock besides the transaction: the index may be thrown away and built anew, and
        # two processes must not compare and rename in the old one and the new one at once.
        try:
            with one_at_a_time(path.parent), self.index.transaction() as db:
                if self.version(record.tenant_id, record.name) != started_from:
                    return None
                self._refuse_unsealed()
                for bad in filter(files.stands, paths if started_from == (0, "") else ()):
                    self.place.set_aside(bad, "a session file that could not be read")
                for other in paths[1:]:
                    rename_pin(db, pin_key(other), pin_key(path))
                follow_pin(db, pin_key(path), record.path)
                count_session(db, path, draft.size, record, sealed=self.keys.seals)
                room.publish(db, path)
        except StoreError:
            if not room.published:
                raise  # else the file stands, and the next listing finds what the index missed
        note_session(self.index, path, inode, record, sealed=self.keys.seals)
        written = parse_session(memoryview(b"".join(draft.packed.buffers)))
        return dataclasses.replace(written, sealed=self.keys.seals)

    def _refuse_unsealed(self) -> None:
        """Another process may have made the store an encrypted one since the draft was written."""
        if not self.keys.seals and read_settings(self.place).encrypt:
            self.keys.seals = True
            raise Vanished("the store became an encrypted one meanwhile", "save again")

    def store_beside(
        self, record: SessionRecord, codec: Codec, layout: Layout, tail: Rows
    ) -> SessionMoved:
        """Store a session as `NAME@n`, because another one stands under its name by now."""
        number = 2
        while True:
            name = f"{record.name}@{number}"
            number += 1
            if files.stands(self.path(record.tenant_id, name)):
                continue
            beside = dataclasses.replace(record, name=name, revision=1)
            with self.draft(beside, codec, layout, tail) as draft:
                written = self.publish(draft, (0, ""))
            if written is not None:
                self.sync(beside)
                return SessionMoved(
                    written,
                    f"session {record.name!r} was saved or removed by another process meanwhile;"
                    f" this one is stored as {name!r}",
                    f"kvsnap show {name} shows it; kvsnap rm removes the one you do not want",
                )

    def sync(self, record: SessionRecord) -> None:
        """Bring the folders' entries of a saved session to the device. What stood unsealed in a store
        that became an encrypted one goes then: not before, or a kill could leave neither."""
        path, *others = self._paths(record.tenant_id, record.name)
        files.sync_all([path.parent, path.parent.parent, self.place.root])
        for other in filter(files.stands, others):
            with one_at_a_time(path.parent), files.store_errors(other):
                if files.stands(path):
                    self._replace(other, path)

    def _replace(self, old: Path, new: Path) -> None:
        """Remove a session's file that `new` is the later form of, and let its pin, which names the
        file, follow."""
        with contextlib.suppress(Damaged, Unsupported, FileNotFoundError):
            pinned = read_pin(self.place.pin(old))
            moved = dataclasses.replace(pinned, name=new.name.removesuffix(SUFFIX))
            with self.space.write(pack_pin(moved)) as room:
                files.sync_all([room.path])
                with self.index.transaction() as db:
                    rename_pin(db, pin_key(old), pin_key(new))
                    room.publish(db, self.place.pin(new))
        with self.index.transaction() as db:
            forget_session(db, old)
            self._delete(old)

    def require(self, tenant_id: str, name: str) -> Path:
        """The path of a session that is there, readable or not; raises `NotFound`."""
        path = self.path(tenant_id, name)
        if files.file_size(path) is None and not path.is_dir():
            raise no_session(name)
        return path

    def remove(self, tenant_id: str, name: str) -> int:
        """Delete one session file and its pin (its blocks stay for others, and may be evicted);
        returns the bytes freed."""
        self.require(tenant_id, name)
        return sum(map(self._remove, filter(files.stands, self._paths(tenant_id, name))))

    def _remove(self, path: Path) -> int:
        size = files.file_size(path)
        try:
            with self.index.transaction() as db:
                end_pin(db, pin_key(path))
                forget_session(db, path)
                self._delete(path)
        except StoreFull:
            self._delete(path)  # that makes room; the index follows when it is compared next
        return size or 0

    def _delete(self, path: Path) -> None:
        with files.store_errors(path):
            self.place.pin(path).unlink(missing_ok=True)
            if files.is_folder(path):
                self.place.set_aside(path, "a folder stood in the file's place")
            else:
                path.unlink(missing_ok=True)
