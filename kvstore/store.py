"""Store: the one door to a folder of blocks and sessions."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvsnap.kvstore import files
from kvsnap.kvstore.blocks import Blocks
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place, default_path, read_settings
from kvsnap.kvstore.rebuild import fill_from_files
from kvsnap.kvstore.sessions import Sessions
from kvsnap.kvstore.weights import FileDigests


class Store:
    """Open a store; nothing is created before something is written.

    `path` defaults to KVSNAP_STORE or the platform's user cache folder. Any number of threads and
    processes may use one folder. Raises `StoreError` where the folder cannot be one and
    `Unsupported` for another format version.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        root = Path(path).expanduser() if path is not None else default_path()
        self.place = Place(root.absolute())
        settings = read_settings(self.place)
        self.block_size = settings.block_size
        self.problem = settings.problem
        self.index = Index(self.place.index, self._fill)
        self.blocks = Blocks(self.place, self.index)
        self.sessions = Sessions(self.place, self.index)
        self.file_digest = FileDigests(self.index)

    @property
    def path(self) -> Path:
        return self.place.root

    def sync(self, names: Sequence[bytes]) -> None:
        """Bring the blocks' files to the device, where they are not there yet, then their folders.

        Files go in parallel; a folder's entry is synced after the files in it.
        """
        rows = (self.index.find(name) for name in names)
        due = [row.name for row in rows if row is not None and not row.synced]
        paths = [self.place.block(name) for name in due]
        files.sync(paths)
        if paths:
            files.sync([*(path.parent for path in paths), self.place.blocks])
            self.index.mark_synced(due)

    def close(self) -> None:
        self.index.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fill(self, db: sqlite3.Connection) -> None:
        fill_from_files(self.place, db)
