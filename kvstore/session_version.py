"""Replace a session's file by its next version, once the blocks of its chain are durable."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import SessionMoved, StoreFull
from kvsnap.formats.layout import Layout, Rows
from kvsnap.formats.session import SessionFile, SessionRecord
from kvsnap.kvstore.sessions import Version
from kvsnap.kvstore.store import Store


@dataclass(frozen=True)
class NextVersion:
    """What is to be stored, and which version it may replace. `codec` is the tail's."""

    record: SessionRecord
    codec: Codec
    layout: Layout
    tail: Rows
    started_from: Version

    def replace(
        self, store: Store, put: Callable[[], int], give_way: Callable[[], None] = lambda: None
    ) -> tuple[SessionFile | None, int]:
        """Store the blocks by `put`, which returns how many of the chain are stored, then publish
        the file: (the file as written, that number). None instead of the file where the version
        that it started from is not there any more; then nothing but blocks was stored.

        The file is written first. It takes others' room; only where that is not enough, `give_way`
        lets go of the session's own blocks: they are a cache, the conversation is not. `sync`
        afterwards makes the new version durable.
        """
        with contextlib.ExitStack() as stack:
            drafting = store.sessions.draft
            try:
                draft = stack.enter_context(drafting(*self._file))
            except StoreFull:
                give_way()
                draft = stack.enter_context(drafting(*self._file))
            stored = put()
            store.sync(self.record.chain[:stored])
            return store.sessions.publish(draft, self.started_from), stored

    def store_beside(self, store: Store) -> SessionMoved:
        """Store it under another name, because another version stands there by now."""
        return store.sessions.store_beside(*self._file)

    def sync(self, store: Store) -> None:
        """Bring the folders' entries of the published file to the device."""
        store.sessions.sync(self.record)

    def after(self, written: SessionFile) -> NextVersion:
        """The same once more, on top of what was written."""
        now = written.record
        record = dataclasses.replace(self.record, name=now.name, revision=now.revision + 1)
        started_from = (now.revision, written.file_digest)
        return dataclasses.replace(self, record=record, started_from=started_from)

    @property
    def _file(self) -> tuple[SessionRecord, Codec, Layout, Rows]:
        return self.record, self.codec, self.layout, self.tail
