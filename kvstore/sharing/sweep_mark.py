"""The mark of a sweep that is under way: a push that ends meanwhile looks again when it is gone.

A sweep sets a mark of its own, then reads the manifests, then deletes. A push writes its manifest,
then looks for marks. Whichever came first, one of the two sees the other: either the sweep finds the manifest
and keeps what it names, or the push waits for the sweep's end and sends again what went.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

from kvsnap.formats.errors import PartlyDone, RemoteError
from kvsnap.kvstore.remotes.base import Remote

FOLDER = "sweeping/"
_TEXT = b"a sweep of this remote, or a look at its clock\n"
REFRESH = 60.0
"""Seconds after which a sweep that is still at work sets its mark again."""
STALE = 20 * REFRESH
"""A mark this old is that of a sweep that died."""
LONGEST_WAIT = 120.0
"""Seconds that a push waits."""


@contextlib.contextmanager
def marked(remote: Remote, clock: Callable[[], float] = time.time) -> Iterator[Callable[[], None]]:
    """Yields what the sweep calls while it works."""
    mark, last = _key(), clock()
    remote.put(mark, _TEXT)

    def refresh() -> None:
        nonlocal last
        if clock() - last > STALE / 2:  # the machine slept: pushes may take the mark for a dead one
            raise RemoteError("the sweep stood still for too long, and ends here", "run it again")
        if clock() - last > REFRESH:
            remote.put(mark, _TEXT)
            last = clock()

    try:
        yield refresh
    finally:
        remote.delete(mark)


def remote_time(remote: Remote) -> float:
    """Unix seconds by the remote's clock, which files' times are told in; ours may be hours off."""
    probe = _key()
    remote.put(probe, _TEXT)
    try:
        return next((e.changed for e in remote.list(FOLDER) if e.key == probe), time.time())
    finally:
        remote.delete(probe)


def wait_for_sweep(
    remote: Remote,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when no sweep is under way. Raises `PartlyDone` where one does not end."""
    if not remote.abilities.list:  # nobody can sweep it
        return
    waited = 0.0
    while _under_way(remote):
        if waited >= LONGEST_WAIT:
            raise PartlyDone(
                f"pushed, but a sweep of {remote.url} is under way and may have met files of it",
                "push again when it is done: what went is sent again",
            )
        sleep(1.0)
        waited += 1.0


def _under_way(remote: Remote) -> bool:
    marks = list(remote.list(FOLDER))
    if not marks:
        return False
    now = remote_time(remote)
    return any(mark.changed > now - STALE for mark in marks)


def _key() -> str:
    return f"{FOLDER}{secrets.token_hex(8)}"
