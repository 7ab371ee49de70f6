"""Blocks on their way to the store, behind a serving engine's back: a thread writes, memory is bounded.

Nothing waits for it. What does not fit into the memory that may wait is dropped, and the blocks that
follow it cannot be stored before it: a smaller reuse later, where the alternative is a slower engine now.
Files are not synced: a power cut may cost them, and what it leaves of one is found out when it is read.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import KvsnapError, StoreFull, Vanished
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Layout, Rows
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Wanted

_log = logging.getLogger("kvsnap")


@dataclass(frozen=True, eq=False)
class Batch:
    """Consecutive blocks of one chain. `rows` is called in the thread, once, and may wait for a device;
    it gives the rows of each block. `chain`: the names from the first block of the sequence to the last
    of these, where a remote is to have them, too; else empty."""

    root: Root
    wanted: Sequence[Wanted]
    layout: Layout
    rows: Callable[[], Sequence[Rows]]
    size: int
    """Bytes of the rows."""
    chain: Sequence[bytes] = ()


class PageWriter:
    """Writes for one store by one codec, in the order in which batches come: parents first."""

    def __init__(self, store: Store, codec: Codec, most_bytes: int) -> None:
        """`most_bytes` of rows may wait."""
        self.store, self.codec, self.most_bytes = store, codec, most_bytes
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvsnap-pages")
        self._lock = threading.Lock()
        self._waiting: Counter[bytes] = Counter()
        self._bytes = 0
        self._counts = Counter[str]()
        self._last: Future[None] | None = None
        self._told: set[str] = set()

    def is_waiting(self, name: bytes) -> bool:
        """Whether a block is on its way to the store."""
        return name in self._waiting

    def room_for(self, count: int) -> bool:
        """Whether so many bytes may wait besides those that do."""
        return self._bytes + count <= self.most_bytes

    def add(self, batch: Batch) -> None:
        """Let a batch wait; the caller has asked for room."""
        with self._lock:
            self._bytes += batch.size
            self._waiting.update(block.name for block in batch.wanted)
        self._last = self._pool.submit(self._write, batch)

    def drop(self, blocks: int) -> None:
        """Count blocks that there was no room for."""
        self._count("dropped", blocks)

    def take_counts(self) -> dict[str, int]:
        """What was done since the last time: blocks and bytes `written`, blocks `dropped`."""
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
        return counts

    def flush(self) -> None:
        """Wait for all that was added until now."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, batch: Batch) -> None:
        done = 0
        try:
            rows = batch.rows()
            with self.store.holds.lease() as lease:
                for block, own in zip(batch.wanted, rows, strict=True):
                    size = self.store.blocks.put(
                        batch.root, block, self.codec, batch.layout, own, lease
                    )
                    done += 1
                    if size:
                        self._count("written", 1)
                        self._count("written_bytes", size)
            if batch.chain and self.store.behind is not None:
                self.store.behind.send_chain(batch.root.tenant_id, batch.chain)
        except Vanished:  # the block before was dropped, or evicted meanwhile
            self._count("dropped", len(batch.wanted) - done)
        except (KvsnapError, OSError, MemoryError, RuntimeError) as error:  # the last: of a device
            self._count("dropped", len(batch.wanted) - done)
            self.tell(error)
        finally:
            with self._lock:
                self._bytes -= batch.size
                self._waiting -= Counter(block.name for block in batch.wanted)

    def _count(self, what: str, number: int) -> None:
        with self._lock:
            self._counts[what] += number

    def tell(self, error: Exception) -> None:
        """Log why blocks are not stored, once a kind: a store that is full stays so for thousands."""
        kind = type(error).__name__
        if kind not in self._told:
            self._told.add(kind)
            hint = getattr(error, "hint", "")
            level = logging.WARNING if isinstance(error, StoreFull) else logging.ERROR
            _log.log(
                level, "kvsnap: blocks are not stored: %s%s", error, f" ({hint})" if hint else ""
            )
