"""Pages of one host pool of SGLang as blocks of a store: looked for, read, written. No SGLang is imported.

Callers come from several threads of SGLang's. What is raised here, the storage (sglang.py) turns into
pages that are not there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvsnap.engines.sglang_chain import WORDS, Places
from kvsnap.engines.sglang_identity import PLANE, page_layout
from kvsnap.formats.codecs import Codec
from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.formats.identity import Root
from kvsnap.formats.layout import Array, Layout
from kvsnap.kvstore.restore import MAX_THREADS
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss, Wanted

Say = Callable[[str, str], None]
"""Takes a kind and a text, and logs the first text of a kind."""
Prefix = Sequence[str] | None
"""Hashes of the pages before, from the sequence's start; None where SGLang does not say."""


class Pages:
    """Of one rank, under one root."""

    def __init__(self, store: Store, root: Root, pool: Any, codec: Codec, say: Say) -> None:
        self.store, self.root, self.pool, self.codec = store, root, pool, codec
        self.layout = page_layout(pool)
        self._say = say
        self._places = Places(root.key, self._stored)
        self._own = threading.local()
        count = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="kvsnap read")

    def count(self, prefix: Prefix, keys: Sequence[str]) -> int:
        """How many of the first pages are stored here or in the remote, as far as indexes tell."""
        found = self._places.find(prefix, keys)
        count = len(found) + len(self._in_remote(prefix, found, keys))
        if not count:
            self.store.index.count_request(None, 0, len(keys) * self.pool.page_size)
        return count

    def read(
        self,
        prefix: Prefix,
        keys: Sequence[str],
        targets: Sequence[torch.Tensor | None] | None,
        land: Callable[[int, torch.Tensor], None],
    ) -> list[torch.Tensor | None]:
        """Each page is read whole and passes every check before `land` is called with its number and
        itself: in one of `targets`, where there are any. None for one that cannot be used."""
        store = self.store
        found = self._places.find(prefix, keys)
        more = self._in_remote(prefix, found, keys)
        wanted = [*found, *more]
        wait: Callable[[bytes], str | None] = lambda name: None
        if more and store.through is not None:
            wait = store.through.fetch(self.root, more, lambda start, stop: None).wait

        def one(number: int) -> torch.Tensor | None:
            block = wanted[number]
            target = targets[number] if targets is not None else None
            page = target if target is not None else self._scratch(fresh=targets is not None)
            try:
                rows = {PLANE: bytes_of(page, self.layout)}
                if lost := wait(block.name):
                    raise Miss(block.name, lost)
                store.blocks.read_into(self.root, block, self.layout, rows, slice(0, WORDS))
                land(number, page)
            except Miss as miss:
                self._say(f"miss {miss.reason}", str(miss))
                return None
            except (KvsnapError, OSError, MemoryError, RuntimeError, ValueError) as error:
                self._say(f"read {type(error).__name__}", f"read: {error}")
                return None
            return page

        with store.holds.lease() as lease:
            if found:
                lease.keep(found[-1].name, wait=False)
            pages = list(self._threads.map(one, range(len(wanted))))
        good = next((n for n, page in enumerate(pages) if page is None), len(pages))
        if good:
            size, left = self.pool.page_size, len(keys) - good
            store.index.count_request(wanted[good - 1].name, good * size, left * size)
        return [*pages, *[None] * (len(keys) - len(pages))]

    def write(
        self,
        prefix: Prefix,
        keys: Sequence[str],
        page: Callable[[int], Any],
        done: list[bool],
    ) -> None:
        """Store what is not there, in order; `done` gets True for each page that is stored then. What
        is to stand behind a block that is gone is not stored: nobody would find it."""
        blocks, wanted = self.store.blocks, self._places.to_store(prefix, keys)
        with self.store.holds.lease() as lease:
            if wanted[0].start and not lease.keep(wanted[0].parent, wait=False):
                self._say("parent", "what stands before a page is not stored any more")
                return
            for number, block in enumerate(wanted):
                if not blocks.has(block.name):
                    rows = {PLANE: bytes_of(page(number), self.layout)}
                    blocks.put(self.root, block, self.codec, self.layout, rows, lease)
                done.append(True)
        if self.store.behind is not None:
            names = [block.name for block in wanted]
            for chain in [names] if prefix is not None else [[name] for name in names]:
                self.store.behind.send_chain(self.root.tenant_id, chain)

    def close(self) -> None:
        """The store stays open; reads that are under way are waited for."""
        self._threads.shutdown()

    def _in_remote(
        self, prefix: Prefix, found: Sequence[Wanted], keys: Sequence[str]
    ) -> list[Wanted]:
        """Blocks of the pages after those found that the remote has."""
        through = self.store.through
        if through is None or len(found) == len(keys):
            return []
        more = self._places.behind(prefix, found, keys)
        reach = through.reach([block.name for block in more], 0, len(more))
        if problem := through.take_problem():
            self._say("remote", f"the remote was not asked: {problem}")
        self._places.remember(keys[len(found) :], more[:reach])
        return more[:reach]

    def _stored(self, names: Sequence[bytes]) -> AbstractSet[bytes]:
        """Those of some blocks that can be read, as far as the index tells."""
        if len(names) == 1:
            return {names[0]} if self.store.blocks.offers(names[0]) else set()
        found: set[bytes] = set()
        for start in range(0, len(names), 500):
            part = names[start : start + 500]
            marks = ",".join("?" * len(part))
            sql = f"SELECT name FROM blocks WHERE reachable = 1 AND name IN ({marks})"
            found |= {bytes(name) for (name,) in self.store.index.query(sql, list(part))}
        return found

    def _scratch(self, *, fresh: bool) -> torch.Tensor:
        """A flat page of plain memory; SGLang's own dummies are page-locked, one by one."""
        page: torch.Tensor | None = getattr(self._own, "page", None)
        if fresh or page is None:
            _, plane = self.layout.planes()[PLANE]
            size = plane.row[0] // self.pool.dtype.itemsize
            page = torch.empty(size, dtype=self.pool.dtype)
        if not fresh:
            self._own.page = page
        return page


def bytes_of(page: Any, layout: Layout) -> Array:
    """A page's memory as the one row of its plane, [1, bytes]; of a page on a device a copy. Raises
    `UsageError` where it is no page of this pool."""
    _, plane = layout.planes()[PLANE]
    if not isinstance(page, torch.Tensor):
        raise UsageError(f"a page is a tensor, not {type(page).__name__}")
    flat = page.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if flat.numel() != plane.row[0]:
        raise UsageError(f"a page of {flat.numel()} bytes, where the pool's have {plane.row[0]}")
    found: Array = flat.numpy().reshape(1, -1)
    return found
