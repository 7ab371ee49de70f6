"""A process that is killed at a chosen point, as far as the disk and other processes can tell."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from kvsnap.kvstore import space
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.store import Store


class Killed(BaseException):
    """No `Exception`: nothing that handles errors may go on after it."""


def die(store: Store) -> None:
    """The lock ends with the process; its rows and files stay."""
    store.index.close()
    store.owner.forget()


@contextlib.contextmanager
def killed_between_rename_and_row() -> Iterator[list[Path]]:
    """The first file that is published ends the block of code: it is renamed, and its transaction
    rolled back; nothing is given back or tidied up. Yields a list of that file's place."""
    publish, renamed = space.Room.publish, list[Path]()

    def rename_and_die(room: space.Room, db: sqlite3.Connection, target: Path) -> None:
        publish(room, db, target)
        renamed.append(target)
        raise Killed

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(Killed))
        stack.enter_context(mock.patch.object(space.Room, "publish", rename_and_die))
        stack.enter_context(mock.patch.object(space.Space, "_give_back"))
        stack.enter_context(mock.patch.object(Lease, "end"))
        yield renamed
