"""Session files: load, replace by revision, list, remove."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import Damaged, NotFound, SessionMoved
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.session import SessionFile, SessionRecord, pack_session, parse_session
from kvsnap.formats.session_name import session_file_name
from kvsnap.kvstore import files
from kvsnap.kvstore.holds import end_pin, follow_pin, pin_key
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.session_file import no_session, read_session
from kvsnap.kvstore.session_list import count_session, forget_session, note_session
from kvsnap.kvstore.space import Space

_SAVE_AGAIN = "save its prompt again: blocks that are stored are reused"

Version = tuple[int, str]
"""(revision, file digest) of a session file."""


class Sessions:
    """The sessions of one store. A save replaces only the revision that it started from."""

    def __init__(self, place: Place, index: Index, space: Space) -> None:
        self.place, self.index, self.space = place, index, space

    def path(self, tenant_id: str, name: str) -> Path:
        return self.place.sessions / tenant_id / session_file_name(name)

    def load(self, tenant_id: str, name: str) -> SessionFile:
        """Read and check one session. Raises `NotFound`, or `Damaged` with the file left alone."""
        path = self.path(tenant_id, name)
        try:
            found = read_session(path)
        except (FileNotFoundError, NotADirectoryError):
            raise no_session(name) from None
        except OSError as error:
            raise files.store_error(error, path, "read") from error
        except Damaged as error:
            raise Damaged(f"session {name!r} is damaged: {error.what}", _SAVE_AGAIN) from error
        if found.record.name != name or found.record.tenant_id != tenant_id:
            raise Damaged(
                f"session {name!r} is damaged: its file holds {found.record.name!r}", _SAVE_AGAIN
            )
        return found

    def version(self, tenant_id: str, name: str) -> Version:
        """What stands under a name; (0, "") for nothing, or for a damaged file to replace."""
        try:
            found = self.load(tenant_id, name)
        except (NotFound, Damaged):
            return 0, ""
        return found.record.revision, found.file_digest

    def save(
        self, record: SessionRecord, codec: Codec, layout: Layout, tail: Rows, started_from: Version
    ) -> SessionFile:
        """Write `record` as the revision after `started_from`, synced before it appears; `sync`
        makes the appearing durable too. If that fails, a retry starts from what is returned here: the file
        as it was written, never read back.

        Raises `SessionMoved` after storing it as `NAME@n` where the session changed meanwhile. A
        damaged file that it replaces goes to quarantine.
        """
        new = dataclasses.replace(record, revision=started_from[0] + 1)
        written = self._replace(new, codec, layout, tail, started_from)
        if written is not None:
            return written
        number = 2
        while True:
            aside = dataclasses.replace(record, name=f"{record.name}@{number}", revision=1)
            written = self._replace(aside, codec, layout, tail, (0, ""), must_be_new=True)
            if written is not None:
                self.sync(aside)
                raise SessionMoved(
                    written,
                    f"session {record.name!r} was saved or removed by another process meanwhile;"
                    f" this one is stored as {aside.name!r}",
                    f"kvsnap show {aside.name} shows it; kvsnap rm removes the one you do not want",
                )
            number += 1

    def sync(self, record: SessionRecord) -> None:
        """Bring the folders' entries of a saved session to the device."""
        folder = self.path(record.tenant_id, record.name).parent
        files.sync_all([folder, folder.parent, self.place.root])

    def require(self, tenant_id: str, name: str) -> Path:
        """The path of a session that is there, readable or not; raises `NotFound`."""
        path = self.path(tenant_id, name)
        if files.file_size(path) is None and not path.is_dir():
            raise no_session(name)
        return path

    def remove(self, tenant_id: str, name: str) -> int:
        """Delete one session file and its pin (its blocks stay for others, and may be evicted);
        returns the bytes freed."""
        path = self.require(tenant_id, name)
        size = files.file_size(path)
        with self.index.transaction() as db, files.store_errors(path):
            end_pin(db, pin_key(path))
            forget_session(db, path)
            self.place.pin(path).unlink(missing_ok=True)
            if size is None:
                self.place.set_aside(path, "a folder stood in the file's place")
            else:
                path.unlink(missing_ok=True)
        return size or 0

    def _replace(
        self,
        record: SessionRecord,
        codec: Codec,
        layout: Layout,
        tail: Rows,
        started_from: Version,
        must_be_new: bool = False,
    ) -> SessionFile | None:
        """The file that now stands there; None where something else did.

        The whole file that a save started from is compared, not its revision alone: a session can
        be removed and saved anew, or an older file put back.
        """
        path = self.path(record.tenant_id, record.name)
        packed = pack_session(record, codec, layout, tail)
        with self.space.write(packed) as room:
            files.make_dir(path.parent)
            files.sync_all([room.path])
            with files.store_errors(room.path):
                inode = room.path.stat().st_ino
            with self.index.transaction() as db:
                occupied = files.stands(path)
                if occupied and must_be_new:
                    return None
                if self.version(record.tenant_id, record.name) != started_from:
                    return None
                if occupied and started_from == (0, ""):
                    self.place.set_aside(path, "a session file that could not be read")
                follow_pin(db, pin_key(path), record.chain)
                count_session(db, path, packed.size, record)
                room.publish(db, path)
        note_session(self.index, path, inode, record)
        return parse_session(memoryview(b"".join(packed.buffers)))
