"""Saves in a thread of their own: the rows are out of the engine, which goes on meanwhile.

One save at a time, in order. What went wrong is kept, and raised once by whoever asks next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from concurrent import futures

from kvsnap.formats.errors import IndexDamaged, StoreFull, Vanished
from kvsnap.formats.layout import Rows
from kvsnap.formats.names import TokenIds
from kvsnap.formats.session import SessionFile
from kvsnap.kvstore.chain_writer import SLAB_BLOCKS, ChainWriter, RowSource
from kvsnap.kvstore.holds import Lease
from kvsnap.kvstore.reports import SaveReport
from kvsnap.kvstore.retry import try_again
from kvsnap.kvstore.saving import Saving
from kvsnap.kvstore.store import Store

MOST_BLOCKS = SLAB_BLOCKS
"""Of one session, the rows of so many blocks and of a tail may wait in memory: 67 MB at 128 kB a
token. What a turn adds is less, as a rule."""


def take_out(saving: Saving, lease: Lease, hold: Callable[[SessionFile], None]) -> Saving:
    """The same save with its rows out of the engine. What is missing before the last `MOST_BLOCKS`
    blocks is stored here and now; raises `StoreFull` where there is no room for that."""
    store, writer, wanted = saving.store, saving.writer, saving.wanted
    front = max(0, len(wanted) - MOST_BLOCKS)
    if front:
        # In a store that became an encrypted one, blocks from before are stored once more, sealed.
        writer.put(wanted[:front], lease, check_all=store.encrypt)
    writer.lease_stored(wanted, lease)
    missing = (block.start for block in wanted[front:] if not store.blocks.has(block.name))
    stop = len(wanted) * store.block_size
    rows = TakenRows(writer.engine, next(missing, stop), stop)
    taken = ChainWriter(store, rows, writer.root, writer.codec)
    taken.written, taken.states, taken.raw = writer.written, writer.states, writer.raw
    writer.start_anew()
    writer.waiting = []
    return dataclasses.replace(saving, writer=taken, hold=hold)


def write_out(saving: Saving, lease: Lease, ending: contextlib.ExitStack) -> SaveReport:
    """A save that was taken out, under the lease that it was taken out with and that `ending` ends."""

    def write_again() -> SaveReport:
        with saving.store.holds.lease() as anew:
            return saving.write(anew)

    with ending:
        with contextlib.suppress(IndexDamaged, Vanished):
            return saving.write(lease)
        return try_again(write_again)


class TakenRows:
    """What a `ChainWriter` asks of an engine, answered with rows that were taken out of it: those
    of the positions from `start` to the end of the last filled block."""

    def __init__(self, engine: RowSource, start: int, stop: int) -> None:
        self.layout = engine.layout
        self._ids = engine.token_ids()
        self._start = start
        self._rows: Rows = engine.export(start, stop) if start < stop else {}

    def token_ids(self) -> TokenIds:
        return self._ids.copy()

    def export(self, start: int, stop: int) -> Rows:
        """Raises `Vanished` for a block that was stored when the rows were taken."""
        if start < self._start:
            raise Vanished("a stored block was damaged while its session was saved", "save again")
        low, high = start - self._start, stop - self._start
        return {name: array[:, low:high] for name, array in self._rows.items()}

    def export_state(self) -> Rows:
        """None: a save takes its checkpoints out beforehand."""
        return {}


class Background:
    """The thread of one session, made for its first save and ended by `close`.

    A process that ends, however it ends, before the save in progress was waited for may leave the
    version before it: Python ends the threads that the save itself needs.
    """

    def __init__(self) -> None:
        self._thread: futures.ThreadPoolExecutor | None = None
        self._running: futures.Future[SaveReport] | None = None

    def start(
        self, store: Store, ask: Callable[[], Saving], hold: Callable[[SessionFile], None]
    ) -> None:
        """Take out what `ask` says is to be saved, and begin to write it. Nothing may be running:
        `finish` first. Where the store is full that is waited for, as the rest is in the engine."""
        if self._thread is None:
            self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="kvsnap-save")
        submit = self._thread.submit

        def begin() -> futures.Future[SaveReport]:
            with contextlib.ExitStack() as stack:
                lease = stack.enter_context(store.holds.lease())
                saving = ask()
                try:
                    taken = take_out(saving, lease, hold)
                except StoreFull:
                    running = submit(write_out, saving, lease, stack.pop_all())
                    futures.wait([running])
                    return running
                return submit(write_out, taken, lease, stack.pop_all())

        self._running = try_again(begin)

    def finish(self) -> SaveReport | None:
        """Wait for the save in progress: its report, None where there was none. Raises what it
        raised."""
        if self._running is None:
            return None
        futures.wait([self._running])
        running, self._running = self._running, None
        return running.result()

    def close(self) -> None:
        """End the thread, which lets the store close what that had opened."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
