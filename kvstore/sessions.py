"""Session files: load, replace by revision, list, remove."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvsnap.formats.codecs import Codec
from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, SessionMoved
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.session import SessionFile, SessionRecord, pack_session, parse_session
from kvsnap.formats.session_name import SUFFIX, session_file_name
from kvsnap.kvstore import files
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place, write_settings

_SAVE_AGAIN = "save its prompt again: blocks that are stored are reused"

Version = tuple[int, str]
"""(revision, file digest) of a session file."""


@dataclass(frozen=True)
class Listed:
    """A session file in the store; `problem` says why it cannot be read, if so."""

    path: Path
    size: int
    session: SessionFile | None
    problem: str = ""


class Sessions:
    """The sessions of one store. A save replaces only the revision that it started from."""

    def __init__(self, place: Place, index: Index) -> None:
        self.place, self.index = place, index

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
    ) -> Version:
        """Write `record` as the revision after `started_from`, synced before it appears; `sync`
        makes the appearing durable too. If that fails, a retry starts from what is returned here.

        Raises `SessionMoved` after storing it as `NAME@n` where the session changed meanwhile. A
        damaged file that it replaces goes to quarantine.
        """
        new = dataclasses.replace(record, revision=started_from[0] + 1)
        digest = self._replace(new, codec, layout, tail, started_from)
        if digest:
            return new.revision, digest
        number = 2
        while True:
            aside = dataclasses.replace(record, name=f"{record.name}@{number}", revision=1)
            if self._replace(aside, codec, layout, tail, (0, ""), must_be_new=True):
                self.sync(aside)
                raise SessionMoved(
                    aside.name,
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
        """Delete one session file (its blocks stay for others); returns the bytes freed."""
        path = self.require(tenant_id, name)
        size = files.file_size(path)
        with files.store_errors(path):
            if size is None:
                self.place.set_aside(path, "a folder stood in the file's place")
            else:
                path.unlink()
        return size or 0

    def list(self) -> Iterator[Listed]:
        """All sessions of all tenants, damaged ones with their problem."""
        for path in sorted(self.place.sessions.glob(f"*/*{SUFFIX}")):
            size = files.file_size(path) or 0
            try:
                yield Listed(path, size, read_session(path))
            except FileNotFoundError:
                continue
            except KvsnapError as error:
                yield Listed(path, size, None, error.what)
            except OSError as error:
                yield Listed(path, size, None, str(error.strerror))

    def _replace(
        self,
        record: SessionRecord,
        codec: Codec,
        layout: Layout,
        tail: Rows,
        started_from: Version,
        must_be_new: bool = False,
    ) -> str:
        """The digest of the file that now stands there; empty where something else did.

        The whole file that a save started from is compared, not its revision alone: a session can
        be removed and saved anew, or an older file put back.
        """
        path = self.path(record.tenant_id, record.name)
        write_settings(self.place)
        files.make_dir(path.parent)
        packed = pack_session(record, codec, layout, tail)
        temporary = files.write_temporary(self.place.temporary, packed)
        try:
            files.sync_all([temporary])
            with self.index.transaction():
                occupied = path.exists() or path.is_symlink()
                if occupied and must_be_new:
                    return ""
                if self.version(record.tenant_id, record.name) != started_from:
                    return ""
                if occupied and started_from == (0, ""):
                    self.place.set_aside(path, "a session file that could not be read")
                with files.store_errors(path):
                    temporary.replace(path)
            return packed.file_digest
        finally:
            temporary.unlink(missing_ok=True)


def read_session(path: Path, *, strict: bool = False) -> SessionFile:
    """Read and check a session file. Unless `strict`, damage to the tail's rows alone passes:
    `tail_rows` will find it, and the conversation itself is whole."""
    buffer = files.read_whole(path)
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


def no_session(name: str) -> NotFound:
    return NotFound(
        f"no session {name!r} in the store", "kvsnap ls shows the sessions that are there"
    )
