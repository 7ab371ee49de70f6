"""Write-behind: what was saved here goes to a remote in a thread, in the order of the saves.

The queue is bounded: a session that waits is pushed once, as it stands when its turn comes, and a
save waits where the queue is full. What went wrong is kept, and raised once by `flush` or `close`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from kvsnap.formats.errors import NotFound, PartlyDone
from kvsnap.kvstore import events
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.remembers import Remembers
from kvsnap.kvstore.sharing.push import push, push_chain
from kvsnap.kvstore.sharing.shared import refuse_sharing
from kvsnap.kvstore.store import Store

MOST_WAITING = 256
"""Sessions and chains; they wait as names, not as rows."""


class Behind:
    """One store's remote to write to."""

    def __init__(self, store: Store, remote: Remote) -> None:
        self.store = store
        # One that is down costs the queue one time limit, not one an item.
        self.remote = Remembers(Counted(remote, events.counts_remote(remote.url)))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvsnap write-behind")
        self._waiting: dict[object, Callable[[], object]] = {}
        self._turns: list[Future[None]] = []
        self._changed = threading.Condition()
        self._known: dict[tuple[str, str], set[bytes]] = {}
        """File digests of versions of a session that later ones replaced here: a chat may go back."""
        self._apart: set[str] = set()
        """Tenants who do not share the remote with another."""

    def send_session(self, tenant_id: str, name: str, replaced: str) -> None:
        """Push a stored session when its turn comes. `replaced`: the file digest of the version that
        it replaced, hex, empty for none."""
        key = (tenant_id, name)
        with self._changed:
            self._known.setdefault(key, set()).add(bytes.fromhex(replaced))
        self._add(key, lambda: self._push(key))

    def send_chain(self, tenant_id: str, names: Sequence[bytes]) -> None:
        """Send blocks that no session names. A sweep of the remote takes them after its grace."""
        if names:
            self._add(names[-1], lambda: self._push_chain(tenant_id, names))

    def flush(self) -> None:
        """Wait for what was sent until now; raises the first error since the last time."""
        with self._changed:
            turns = list(self._turns)
        errors = [turn.exception() for turn in turns]
        with self._changed:  # others may have waited for the same, and raise no error twice
            new = [e for e, turn in zip(errors, turns, strict=True) if turn in self._turns]
            self._turns = [turn for turn in self._turns if turn not in turns]
        for error in new:
            if error is not None:
                raise error

    def close(self) -> None:
        """`flush`, and end the thread."""
        try:
            self.flush()
        finally:
            self._pool.shutdown()
            self.remote.close()

    def _add(self, key: object, work: Callable[[], object]) -> None:
        with self._changed:
            if key in self._waiting:
                return
            self._changed.wait_for(lambda: len(self._waiting) < MOST_WAITING)
            self._waiting[key] = work
            # Turns that went well need no remembering.
            self._turns = [t for t in self._turns if not t.done() or t.exception()]
            self._turns.append(self._pool.submit(self._next))

    def _push(self, key: tuple[str, str]) -> None:
        with self._changed:
            known = set(self._known[key])
        push(self.store, self.remote, *key, known=known)

    def _push_chain(self, tenant_id: str, names: Sequence[bytes]) -> None:
        if not self.store.encrypt and tenant_id not in self._apart:
            refuse_sharing(self.remote, tenant_id)
            self._apart.add(tenant_id)
        push_chain(self.store, self.remote, names)

    def _next(self) -> None:
        with self._changed:
            work = self._waiting.pop(next(iter(self._waiting)))
            self._changed.notify_all()
        try:
            work()
        except NotFound:  # removed since
            return
        except PartlyDone as error:
            if error.report is None:  # a sweep was under way, and may have met files of it
                raise  # else its end was evicted: there is no more to send
