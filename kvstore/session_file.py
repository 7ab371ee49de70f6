"""One session file: read with every check."""

from __future__ import annotations

from pathlib import Path

from kvsnap.formats.container import check_file_digest
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound
from kvsnap.formats.session import SessionFile, parse_session
from kvsnap.kvstore import files


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
