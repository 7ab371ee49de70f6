"""A process that saves before a fault, and what must hold in the store after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvsnap.formats.errors import NotFound
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.stamped import StampedEngine


@contextlib.contextmanager
def computed(
    path: Path, token_ids: Sequence[int] | TokenIds, name: str | None = None
) -> Iterator[Session]:
    """A session of a new process that has computed these ids and saved none of them.

    It has resumed nothing, so that a save meets blocks that nobody has read; and it ends as by a
    kill: nothing is written, and nothing given back.
    """
    engine = StampedEngine()
    engine.evaluate(token_array(token_ids))
    store = Store(path)
    try:
        yield Session(store, engine, name)
    finally:
        store.index.close()
        store.owner.forget()


def assert_saved(store: Store, token_ids: Sequence[int] | TokenIds, name: str) -> None:
    """A session that was reported saved with these ids is there to the last token: all filled
    blocks and the tail are reused, nothing is computed, and every row is right."""
    ids, engine = token_array(token_ids), StampedEngine()
    session = Session(store, engine, name)
    assert session.stored_token_ids().tolist() == ids.tolist()
    report = verify_session(store, session.tenant_id, name)
    assert (report.bad, report.unreachable) == ([], [])
    done = session.resume(ids, leave=0)
    assert (done.damage, done.reused_tokens) == ((), len(ids))
    assert (engine.held, engine.evaluated) == (len(ids), 0)
    engine.check_rows()
    filled = len(ids) // store.block_size * store.block_size
    found = Session(store, StampedEngine()).resume(ids, leave=0)
    assert found.reused_tokens >= filled, "whoever has not the session finds its blocks"


def stored_ids(store: Store, name: str) -> list[int] | None:
    """The ids of a session, None where there is none. One that cannot be read is an error."""
    session = Session(store, StampedEngine(), name)
    try:
        return list(session.stored_token_ids().tolist())
    except NotFound:
        path = store.sessions.path(session.tenant_id, name)
        assert not path.exists(), "the session is there and cannot be read"
        return None


def assert_clean(store: Store) -> None:
    """Every file and every row of the index is right and can be used."""
    report = verify_store(store)
    assert (report.bad, report.unreachable) == ([], [])
