"""What sessions there are, without reading them all: facts of each file, as long as it is the same.

The folder is the truth. A row of the index counts while the file's stamp (length, times, inode) is
the one that it was noted with; other files are read, and noted again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvsnap.formats.errors import KvsnapError, Sealed, StoreError
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.session_name import SUFFIX
from kvsnap.kvstore.holds import pin_key
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.session_file import clear_of_session, read_session, stands_on
from kvsnap.kvstore.weights import stamp_of

SEALED_SESSION = "(sealed)"
"""What is shown for the name of a session whose key is not at hand."""


@dataclass(frozen=True)
class Facts:
    """What a session file says, in short. `last`: its deepest block, hex, empty for none.
    `problem` says why the file cannot be read, if so; then nothing else is known."""

    name: str | None = None
    tokens: int = 0
    blocks: int = 0
    block_size: int = 1
    last: str = ""
    revision: int = 0
    model: str = ""
    kind: str = ""
    problem: str = ""
    sealed: bool = False
    """Then no more than `last` is known without the tenant's key."""


@dataclass(frozen=True)
class Listed:
    """One session file. `stored_blocks`: how many blocks of its chain are there, from the front;
    `pinned_until`: unix seconds, infinite for ever, None where it is not pinned."""

    path: Path
    bytes: int
    saved: int
    facts: Facts
    stored_blocks: int
    pinned_until: float | None


def facts_of(record: SessionRecord) -> Facts:
    return Facts(
        name=record.name,
        tokens=len(record.token_ids),
        blocks=len(record.chain),
        block_size=record.block_size,
        last=record.chain[-1].hex() if record.chain else "",
        revision=record.revision,
        model=str(record.notes.get("model", "")),
        kind=str(record.notes.get("kind", "")),
    )


def _noted(record: SessionRecord, *, sealed: bool) -> Facts:
    """What the index may have of it: who reads that has no key."""
    if not sealed:
        return facts_of(record)
    return Facts(last=clear_of_session(record).last.hex(), sealed=True)


def count_session(
    db: sqlite3.Connection, path: Path, size: int, record: SessionRecord, *, sealed: bool
) -> None:
    """Inside the transaction that publishes a session file: its bytes count from now on. Its stamp
    is known only afterwards (a rename changes it); until then the file is read when it is listed.
    """
    _write(db, path, "", size, int(time.time()), _noted(record, sealed=sealed))


def note_session(
    index: Index, path: Path, inode: int, record: SessionRecord, *, sealed: bool
) -> None:
    """After a session file was published. Where another one stands there by now, that one's
    writer notes it; where nothing can be written, the next listing does."""
    with contextlib.suppress(OSError, StoreError), index.transaction() as db:
        status = path.stat()
        if status.st_ino == inode:
            _note(db, path, status, _noted(record, sealed=sealed))


def forget_session(db: sqlite3.Connection, path: Path) -> None:
    db.execute("DELETE FROM sessions WHERE path = ?", (pin_key(path),))


def fill_sessions(place: Place, db: sqlite3.Connection) -> None:
    """Note every session while the index is built anew."""
    for path, status in _session_files(place.sessions):
        _note(db, path, status, _read(path))


class SessionList:
    """The sessions of one store."""

    def __init__(self, place: Place, index: Index, keys: Keyring) -> None:
        self.place, self.index, self.keys = place, index, keys

    def __iter__(self) -> Iterator[Listed]:
        """All sessions of all tenants, damaged ones with their problem."""
        return self.of(None)

    def of(self, tenant_id: str | None) -> Iterator[Listed]:
        """The same of one tenant; None for all."""
        sql = "SELECT owner, until FROM holds WHERE kind = 'pin' AND until >= ?"
        pins = dict(self.index.query(sql, [time.time()]))
        for path, status, facts in self.refresh(tenant_id):
            yield Listed(
                path=path,
                bytes=_length(status),
                saved=int(status.st_mtime),
                facts=facts,
                stored_blocks=self._deepest(path, facts)[0],
                pinned_until=pins.get(pin_key(path)),
            )

    def refresh(self, tenant_id: str | None = None) -> list[tuple[Path, os.stat_result, Facts]]:
        """Compare the folder, or that of one tenant, with what was noted, and note what is new, where
        that is possible."""
        sql, values = "SELECT path, stamp, facts FROM sessions", list[str]()
        if tenant_id is not None:
            sql, values = f"{sql} WHERE path BETWEEN ? AND ?", [f"{tenant_id}/", f"{tenant_id}0"]
        rows = {path: (stamp, facts) for path, stamp, facts in self.index.query(sql, values)}
        found, new = list[tuple[Path, os.stat_result, Facts]](), list[tuple]()
        for path, status in _session_files(self.place.sessions, tenant_id):
            stamp, text = rows.pop(pin_key(path), ("", ""))
            facts = _parse(text) if stamp == stamp_of(status) else None
            if facts is None:
                facts = _read(path)
                new.append((path, status, facts))
            found.append((path, status, facts))
        if new or rows:
            with contextlib.suppress(StoreError), self.index.transaction() as db:
                for path, status, facts in new:
                    if _is_still(path, status):  # else its writer has noted it meanwhile
                        _note(db, path, status, facts)
                for gone in rows:
                    if not (self.place.sessions / gone).exists():
                        db.execute("DELETE FROM sessions WHERE path = ?", (gone,))
        return [(path, status, self._opened(path, facts)) for path, status, facts in found]

    def _opened(self, path: Path, facts: Facts) -> Facts:
        """Of a sealed session all facts, where the key is at hand."""
        if not facts.sealed or self.keys.get(path.parent.name) is None:
            return facts
        try:
            return replace(facts_of(read_session(path, self.keys).record), sealed=True)
        except (KvsnapError, OSError) as error:
            return replace(facts, problem=str(error))

    def last_stored(self, path: Path, facts: Facts) -> str:
        """The deepest block of a session's chain that is there, hex; empty for none."""
        return self._deepest(path, facts)[1]

    def _deepest(self, path: Path, facts: Facts) -> tuple[int, str]:
        """(blocks that are there, name of the last of them). Only where the chain's own last one is
        not there, the session's file is read."""
        if not facts.last or self.index.is_reachable(bytes.fromhex(facts.last)):
            return facts.blocks, facts.last
        try:
            chain = read_session(path, self.keys).record.chain
        except (KvsnapError, OSError):
            return 0, ""
        depth = self.index.depth(chain)
        return depth, chain[depth - 1].hex() if depth else ""


def _session_files(
    folder: Path, tenant_id: str | None = None
) -> Iterator[tuple[Path, os.stat_result]]:
    for tenant in _folders(folder) if tenant_id is None else [folder / tenant_id]:
        if tenant.is_symlink():
            continue
        for entry in sorted(_entries(tenant), key=lambda entry: entry.name):
            if entry.name.endswith(SUFFIX) and entry.name.isascii():  # as ours are
                with contextlib.suppress(OSError):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)


def _folders(folder: Path) -> list[Path]:
    return sorted(Path(entry.path) for entry in _entries(folder) if entry.is_dir())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return list(entries)
    return []


def _read(path: Path) -> Facts:
    try:
        session = read_session(path, Keyring())
        return facts_of(session.record)
    except Sealed:
        return Facts(last="".join(name.hex() for name in stands_on(path, Keyring())), sealed=True)
    except KvsnapError as error:
        return Facts(problem=error.what)
    except OSError as error:
        return Facts(problem=str(error.strerror))


def _parse(text: str) -> Facts | None:
    """Facts as they were noted; None for what no kvsnap notes, which is read anew."""
    try:
        facts = Facts(**json.loads(text))
        bytes.fromhex(facts.last)
    except (TypeError, ValueError):
        return None
    return facts


def _note(db: sqlite3.Connection, path: Path, status: os.stat_result, facts: Facts) -> None:
    _write(db, path, stamp_of(status), _length(status), int(status.st_mtime), facts)


def _write(
    db: sqlite3.Connection, path: Path, stamp: str, size: int, saved: int, facts: Facts
) -> None:
    db.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?) ON CONFLICT(path) DO UPDATE SET"
        " stamp = excluded.stamp, bytes = excluded.bytes, saved = excluded.saved,"
        " facts = excluded.facts",
        (pin_key(path), stamp, size, saved, json.dumps(asdict(facts))),
    )


def _is_still(path: Path, status: os.stat_result) -> bool:
    try:
        return stamp_of(path.lstat()) == stamp_of(status)
    except OSError:
        return False


def _length(status: os.stat_result) -> int:
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
