"""One save: blocks, then the session's file, then a report. What it needs is known before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvsnap.formats.errors import NotAllStored, PartlyDone, SessionMoved, StoreFull
from kvsnap.formats.session import SessionFile, SessionRecord
from kvsnap.kvstore import events
from kvsnap.kvstore.chain_writer import ChainWriter, State
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.reports import SaveReport
from kvsnap.kvstore.session_version import NextVersion
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

if TYPE_CHECKING:
    from kvsnap.kvstore.sharing.behind import Behind


@dataclass
class Saving:
    """`new` is None where only blocks are stored. `hold` is called with the session's file as soon as
    that is published: the next save starts from it, whatever fails afterwards."""

    store: Store
    writer: ChainWriter
    wanted: Sequence[Wanted]
    tokens: int
    new: NextVersion | None
    pinned: bool
    hold: Callable[[SessionFile], None]
    states: Sequence[State] = ()
    _partly: list[PartlyDone] = field(default_factory=list)

    @events.counts_save("session")
    def write(self, lease: Lease) -> SaveReport:
        """Raises `PartlyDone` with the report where not all of it could be done."""
        # Of an earlier try only this is still true.
        self._partly = [found for found in self._partly if isinstance(found, SessionMoved)]
        name, revision, replaced = None, 0, ""
        if self.new is None:
            self._put(lease)
            stored = len(self.wanted)
            self.store.sync([block.name for block in self.wanted])
        else:
            replaced = self.new.started_from[1]
            record, stored = self._replace(self.new, lease)
            name, revision = record.name, record.revision
            if self.pinned:
                self.store.pins.pin_session(record.tenant_id, record.name)
        self.store.index.write_notes()
        if self.store.behind is not None:
            self._send(self.store.behind, name, replaced)
        report = SaveReport(
            session=name,
            revision=revision,
            tokens=self.tokens,
            blocks=len(self.wanted),
            blocks_stored=stored,
            blocks_written=len(self.writer.written),
            states_written=sum(size > 0 for size in self.writer.states.values()),
            bytes_written=sum(self.writer.written.values()) + sum(self.writer.states.values()),
            bytes_raw=self.writer.raw,
            codec=self.writer.codec.id,
            fidelity=self.writer.root.fidelity,
        )
        self.writer.start_anew()
        if self._partly:
            self._partly[-1].report = report
            raise self._partly[-1]
        return report

    def _send(self, behind: Behind, name: str | None, replaced: str) -> None:
        if self.new is not None and name is not None:
            behind.send_session(self.new.record.tenant_id, name, replaced)
        else:
            behind.send_chain(self.writer.root.tenant_id, [block.name for block in self.wanted])

    def _replace(self, new: NextVersion, lease: Lease) -> tuple[SessionRecord, int]:
        """What the session is now, and how many blocks of its chain are stored."""
        self.writer.lease_stored(self.wanted, lease)
        written, stored = new.replace(
            self.store, lambda: self._put_what_fits(lease), lambda: lease.end(wait=True)
        )
        if written is None:
            moved = new.store_beside(self.store)
            self._partly.append(moved)
            written = moved.stored
            self._published(written)
        else:
            # What was written, not what stands there by now: another process may have saved after
            # us, and its version must not pass for ours.
            self._published(written)
            new.sync(self.store)
        return written.record, stored

    def _published(self, written: SessionFile) -> None:
        """Whatever fails from here on, another try starts from what stands there now."""
        self.hold(written)
        if self.new is not None:
            self.new = self.new.after(written)

    def _put_what_fits(self, lease: Lease) -> int:
        """How many blocks of the chain are stored. The conversation itself is small: better saved
        with the blocks that fit than lost."""
        try:
            self._put(lease)
        except StoreFull as full:
            self.writer.waiting.clear()
            self._sync_states()
            stored = self.writer.stored(self.wanted)
            self._partly.append(NotAllStored(stored, len(self.wanted), full))
            return stored
        return len(self.wanted)

    def _put(self, lease: Lease) -> None:
        """Blocks, then the checkpoints that stand on them; those are synced here."""
        self.writer.put(self.wanted, lease, check_all=True)
        self.writer.put_states(self.states, lease)
        self._sync_states()

    def _sync_states(self) -> None:
        """Those that are still there: one that stands on none of the last blocks may have gone to make
        room for the next."""
        is_reachable = self.store.index.is_reachable
        self.store.sync([name for name in self.writer.states if is_reachable(name)])
