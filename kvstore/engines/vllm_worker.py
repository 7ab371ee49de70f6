"""The worker's side: stored blocks into one rank's pages, filled pages out of them and to the store."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from kvsnap.engines.served_replaced import weights_replaced
from kvsnap.engines.vllm_pages import Pages
from kvsnap.engines.vllm_plan import Done, Family, Move, Plan, Rank
from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.layout import Array
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.page_writer import Batch, PageWriter
from kvsnap.kvstore.restore import MAX_THREADS
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss, Wanted

AT_ONCE = 2 * MAX_THREADS
"""Blocks that are read while earlier ones go into the engine; so many are in memory."""
SAVED_AT_ONCE = 16
"""Blocks that are copied out of the engine by one call for each layer."""
LOADS_AT_ONCE = 2
"""So that a short prompt does not wait behind a long one, nor all behind one that meets damage."""
IDLE_SECONDS = 0.005
"""A new request may wait as long, where all others wait for their loads."""
FAILURES = (KvsnapError, OSError, MemoryError, RuntimeError)
"""What may go wrong with a block; the last is torch's, of a device or of memory. Of anything that is raised
the engine would die."""
_log = logging.getLogger("kvsnap")


@dataclass
class Loaded:
    """What came of one load: vLLM's ids of the pages that were not written, the names of blocks that
    could not be used, and what is counted."""

    failed: set[int] = field(default_factory=set)
    missed: list[bytes] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class Worker:
    """One rank. What goes wrong with the store is a block that is computed, or not saved: never raised."""

    def __init__(
        self,
        store: Store,
        pages: Pages,
        rank: Rank,
        tenant: Tenant | None,
        codec: Codec,
        buffer_bytes: int,
    ) -> None:
        self.store, self.pages, self.rank, self.tenant = store, pages, rank, tenant
        self.writer = PageWriter(store, codec, buffer_bytes)
        self.failed: set[int] = set()
        """vLLM's ids of blocks that could not be loaded, not reported yet."""
        self.missed: list[bytes] = []
        self._readers = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="kvsnap-read")
        self._loader = ThreadPoolExecutor(LOADS_AT_ONCE, thread_name_prefix="kvsnap-load")
        self._loading: dict[str, Future[Loaded]] = {}
        self._buffers: SimpleQueue[dict[str, Array]] = SimpleQueue()
        self._roots: dict[str, Root] = {}
        self._counts = defaultdict[str, float](float)

    def save(self, families: Sequence[Family], moves: Sequence[Move]) -> None:
        """Copy filled blocks out of the engine, those that the store lacks; a thread writes them."""
        for move in moves if not weights_replaced() else ():
            try:
                self._save(self._root(families[move.family]), move)
            except FAILURES as error:
                self.writer.drop(len(move.extras))
                self.writer.tell(error)

    def load(self, plan: Plan) -> None:
        """Begin to read a plan's blocks and write them into the engine, behind all that the device was
        told to do until now. Of a request, what follows a block that cannot be used is given up."""
        for move in plan.loads:
            root, before = self._root(plan.families[move.family]), self.pages.mark()
            self._loading[move.request_id] = self._loader.submit(self._load, root, move, before)

    def take_done(self, step: int) -> Done:
        done, self.missed = Done(step, self.missed, weights_replaced()), []
        return done

    def take_loaded(self, idle: bool) -> set[str]:
        """Requests whose loads have ended since the last time, well or not. Where the engine is `idle`
        this waits a little: vLLM asks again at once, and would take the interpreter from who loads."""
        if idle and self._loading:
            wait(self._loading.values(), IDLE_SECONDS, FIRST_COMPLETED)
        ended = {request_id for request_id, load in self._loading.items() if load.done()}
        for request_id in ended:
            loaded = self._loading.pop(request_id).result()
            self.failed |= loaded.failed
            self.missed += loaded.missed
            self._count(loaded.counts)
        return ended

    def wait_for_loads(self) -> None:
        """Until those that were begun have ended; `take_loaded` tells of them."""
        wait(list(self._loading.values()))

    def take_failed(self) -> set[int]:
        failed, self.failed = self.failed, set()
        return failed

    def take_counts(self) -> dict[str, float]:
        """What was loaded and saved since the last time."""
        self._count(self.writer.take_counts())
        counts, self._counts = self._counts, defaultdict(float)
        return dict(counts)

    def _count(self, counts: Mapping[str, float]) -> None:
        for what, number in counts.items():
            self._counts[what] += number

    def close(self) -> None:
        """Write what waits, and close the store."""
        self.writer.close()
        self._loader.shutdown()
        self._readers.shutdown()
        try:
            self.store.close()
        except KvsnapError as error:
            _log.error("kvsnap: the store's end: %s", error)

    def _root(self, family: Family) -> Root:
        identity = family[self.rank]
        if identity not in self._roots:
            self._roots[identity] = root_of(identity, self.tenant)
        return self._roots[identity]

    def _save(self, root: Root, move: Move) -> None:
        self.store.check_tenant(root.tenant_id)
        in_block = self.pages.pages_in_block
        missing = [
            (block, move.pages[number * in_block : (number + 1) * in_block])
            for number, block in enumerate(move.wanted(self.rank))
            if not self.writer.is_waiting(block.name) and not self._is_stored(block.name)
        ]
        for first in range(0, len(missing), SAVED_AT_ONCE):
            some = missing[first : first + SAVED_AT_ONCE]
            size = len(some) * self.pages.block_bytes
            if not self.writer.room_for(size):
                self.writer.drop(len(missing) - first)
                return
            taken = self.pages.take([page for _, pages in some for page in pages])
            blocks = [block for block, _ in some]
            chain = move.chain.get(self.rank, ())
            self.writer.add(Batch(root, blocks, self.pages.layout, taken, size, chain))

    def _is_stored(self, name: bytes) -> bool:
        """By the index alone, for the engine waits here. `Blocks.put` looks at the file."""
        return name not in self.store.blocks.misses and self.store.blocks.offers(name)

    def _load(self, root: Root, move: Move, before: Any) -> Loaded:
        began, loaded = time.perf_counter(), Loaded()
        if weights_replaced():
            loaded.failed.update(move.pages[move.held :])
            return loaded
        in_block, blocks = self.pages.pages_in_block, move.wanted(self.rank)
        for number, (block, read) in enumerate(self._reading(root, blocks)):
            own = move.pages[number * in_block : (number + 1) * in_block]
            held = move.held if number == 0 else 0
            try:
                rows = read.result()
                self.pages.put(rows, own, held, before)
            except (Miss, *FAILURES) as error:
                _log.warning("kvsnap: %s; it is computed instead", error)
                loaded.failed.update(move.pages[number * in_block + held :])
                loaded.missed.append(block.name)
                loaded.counts["load_failures"] += 1
                break
            self._buffers.put(rows)
            loaded.counts["loaded"] += 1
            loaded.counts["loaded_tokens"] += len(block.token_ids)
            loaded.counts["loaded_bytes"] += self.pages.block_bytes
        loaded.counts["load_seconds"] += time.perf_counter() - began
        return loaded

    def _reading(
        self, root: Root, blocks: Sequence[Wanted]
    ) -> Iterator[tuple[Wanted, Future[dict[str, Array]]]]:
        """Blocks in order, a few of them under way; those behind one that was given up are not read."""
        waiting = deque[tuple[Wanted, Future[dict[str, Array]]]]()
        left = iter(blocks)
        try:
            while True:
                for block in left:
                    waiting.append((block, self._readers.submit(self._read, root, block)))
                    if len(waiting) == AT_ONCE:
                        break
                if not waiting:
                    return
                yield waiting.popleft()
        finally:
            for _, read in waiting:
                read.cancel()
                if not read.cancelled() and read.exception() is None:
                    self._buffers.put(read.result())

    def _read(self, root: Root, block: Wanted) -> dict[str, Array]:
        rows = self._buffer()
        try:
            self.store.blocks.read_into(
                root, block, self.pages.layout, rows, slice(0, len(block.token_ids))
            )
        except BaseException:
            self._buffers.put(rows)
            raise
        return rows

    def _buffer(self) -> dict[str, Array]:
        try:
            return self._buffers.get_nowait()
        except Empty:
            return self.pages.buffer()
