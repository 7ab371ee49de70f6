"""SGLang's HiCache storage on a kvsnap store: `KVSnapStorage`, for `--hicache-storage-backend dynamic`.

SGLang keeps pages of KV on the device, copies them to host pages, and hands these to a storage by the
hash of their tokens and all before. Here they become blocks of kind `pages`, under an identity that
SGLang's keys lack: the weights' digest, types, the layout of host pages, ranks. Matching of single
tokens stays SGLang's. See docs/engines.md.

Its threads call in here while requests wait. None of them ever gets an exception: what cannot be used
is a page that is not there, and the log says once why.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from kvsnap.engines.sglang_chain import WORDS, Places, is_page_hash
from kvsnap.engines.sglang_identity import PLANE, identity_of, page_layout, served_model
from kvsnap.engines.sglang_start import (
    check_interface,
    check_other_pools,
    check_pool,
    installed_release,
    read_options,
)
from kvsnap.engines.sglang_weights import watch, weights_replaced
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.formats.identity import Root, root_of
from kvsnap.formats.layout import Array, Layout
from kvsnap.kvstore.restore import MAX_THREADS
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.wanted import Miss, Wanted

_log = logging.getLogger("kvsnap")
_FAILURES = (KvsnapError, OSError, MemoryError)
_ADVICE = (
    "SGLang does not say what stands before a page: pages are stored alone, and any of them may be"
    ' evicted first; give "hicache_storage_pass_prefix_keys": true in the extra configuration'
)


class KVSnapStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's door to a store. `interface_v1` pages are stored as chains, others alone; both find
    what either stored."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """As SGLang's factory calls it. Raises what is wrong with the release or the options."""
        self.config = storage_config
        self.store: Store | None = None
        self._pool: Any = None
        self._refused = ""
        self._said: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None
        try:
            check_interface(HiCacheStorage, HiCacheStorageConfig, installed_release())
            watch()
            self.options = read_options(dict(storage_config.extra_config or {}))
            self._codec = self.options.make_codec()
        except KvsnapError as error:
            raise self._refuse(error) from error

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this pool's pages. An error here takes the attaching back."""
        super().register_mem_pool_host(mem_pool_host)
        try:
            check_pool(mem_pool_host)
            model = served_model(self.options.model)
            store = self.store = self.options.open_store()
            tenant = self.options.tenant()
            store.keys.add(tenant)
            identity = identity_of(mem_pool_host, self.config, model, store.file_digest)
            self._root: Root = root_of(identity, tenant)
            store.check_tenant(self._root.tenant_id)
        except KvsnapError as error:
            self.close()
            raise self._refuse(error) from error
        self._pool, self._layout = mem_pool_host, page_layout(mem_pool_host)
        self._places = Places(self._root.key, self._stored)
        count = min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="kvsnap read")
        _log.info("kvsnap: pages of root %s… in %s", self._root.root_id[:12], store.path)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One that comes when the rest has been registered is refused here."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if getattr(self, "_complete", False):
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """SGLang's own threads run by now, so what is refused here is passed over from then on."""
        self._complete = True
        try:
            check_other_pools(str(name) for name in getattr(self, "registered_pools", {}))
        except KvsnapError as error:
            raise self._refuse(error) from error

    # What SGLang's threads call.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first pages are stored here, or in the remote."""

        def count(store: Store) -> int:
            prefix = getattr(extra_info, "prefix_keys", None)
            found = self._places.find(prefix, keys)
            if store.through is not None and len(found) < len(keys):
                found += self._in_remote(store, prefix, found, keys)
            if not found:
                store.index.count_request(None, 0, len(keys) * self._pool.page_size)
            return len(found)

        return self._safely("look-up", keys, count, 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Into the host pool's own pages; only what passed every check. SGLang takes the pages before
        the first False."""
        size = self._page_size()

        def land(number: int, page: torch.Tensor) -> None:
            self._pool.set_from_flat_data_page(int(host_indices[number * size]), page)

        prefix = getattr(extra_info, "prefix_keys", None)
        return [page is not None for page in self._read(prefix, keys, None, land)]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages behind `prefix_keys`. After one that cannot be stored none is: it would stand
        behind nothing."""
        size, prefix = self._page_size(), getattr(extra_info, "prefix_keys", None)
        if prefix is None:
            self._say("alone", _ADVICE)

        def page(number: int) -> torch.Tensor:
            return self._pool.get_data_page(int(host_indices[number * size]), flat=True)

        return self._write(prefix, keys, page)

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The given flat pages, filled; None for what cannot be used, whose target is undefined."""
        return self._read(None, keys, target_locations, lambda number, page: None)

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages alone: this call does not say what stands before them."""
        return all(self._write(None, keys, lambda number: values[number]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Nothing: others may use the store, and `kvsnap gc` is for its owner."""
        _log.warning("kvsnap: SGLang asks to clear its storage; the store is left as it is")

    def get_stats(self) -> Any:
        """None: SGLang then reports its own counts, and kvsnap's are in `kvsnap.metrics`."""
        return None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        store, self.store = self.store, None
        if store is not None:
            try:
                store.close()
            except _FAILURES as error:
                _log.warning("kvsnap: %s", error)

    # How they do it.

    def _safely(
        self, doing: str, keys: Sequence[str], work: Callable[[Store], Any], otherwise: Any
    ) -> Any:
        store = self.store
        if store is None or self._refused or weights_replaced() or not keys:
            return otherwise
        for key in keys:
            if not is_page_hash(key):
                self._say("key", f"{key[:80]!r} is no page hash of 64 digits: passed over")
                return otherwise
        try:
            return work(store)
        except _FAILURES as error:
            self._say(f"{doing} {type(error).__name__}", f"{doing}: {error}")
            return otherwise

    def _stored(self, names: Sequence[bytes]) -> set[bytes]:
        assert self.store is not None
        return stored_among(self.store, names)

    def _page_size(self) -> int:
        return self._pool.page_size if self._pool is not None else 1

    def _in_remote(
        self, store: Store, prefix: Sequence[str] | None, found: list[Wanted], keys: Sequence[str]
    ) -> list[Wanted]:
        """Blocks of the pages after those found that the remote has."""
        assert store.through is not None
        more = self._places.behind(prefix, found, keys)
        reach = store.through.reach([block.name for block in more], 0, len(more))
        if problem := store.through.take_problem():
            self._say("remote", f"the remote was not asked: {problem}")
        self._places.remember(keys[len(found) :], more[:reach])
        return more[:reach]

    def _read(
        self,
        prefix: Sequence[str] | None,
        keys: list[str],
        targets: Sequence[torch.Tensor | None] | None,
        land: Callable[[int, torch.Tensor], None],
    ) -> list[torch.Tensor | None]:
        """Pages, each read whole and checked before `land` sees it."""

        def read(store: Store) -> list[torch.Tensor | None]:
            found = self._places.find(prefix, keys)
            more: list[Wanted] = []
            if store.through is not None and len(found) < len(keys):
                more = self._in_remote(store, prefix, found, keys)
            wanted = [*found, *more]

            def one(number: int) -> torch.Tensor | None:
                target = targets[number] if targets is not None else None
                page = target if target is not None else self._pool.get_dummy_flat_data_page()
                lost = waiting(wanted[number].name) if waiting is not None else None
                try:
                    if lost is not None:
                        raise Miss(wanted[number].name, lost)
                    rows = {PLANE: bytes_of(page, self._layout)}
                    whole = slice(0, WORDS)
                    store.blocks.read_into(self._root, wanted[number], self._layout, rows, whole)
                    land(number, page)
                except Miss as miss:
                    self._say(f"miss {miss.reason}", str(miss))
                    return None
                except _FAILURES as error:
                    self._say(f"read {type(error).__name__}", f"read: {error}")
                    return None
                return page

            waiting: Callable[[bytes], str | None] | None = None
            with store.holds.lease() as lease:
                if found:
                    lease.keep(found[-1].name, wait=False)
                if more and store.through is not None:
                    fetching = store.through.fetch(self._root, more, lambda start, stop: None)
                    waiting = fetching.wait
                threads = self._threads
                numbers = range(len(wanted))
                pages = list(threads.map(one, numbers) if threads else map(one, numbers))
            good = next((n for n, page in enumerate(pages) if page is None), len(pages))
            size = self._pool.page_size
            if good:
                left = (len(keys) - good) * size
                store.index.count_request(wanted[good - 1].name, good * size, left)
            return [*pages, *[None] * (len(keys) - len(pages))]

        return self._safely("read", keys, read, [None] * len(keys))

    def _write(
        self,
        prefix: Sequence[str] | None,
        keys: list[str],
        page: Callable[[int], torch.Tensor],
    ) -> list[bool]:
        done: list[bool] = []

        def write(store: Store) -> list[bool]:
            blocks = store.blocks
            wanted = self._places.to_store(prefix, keys)
            with store.holds.lease() as lease:
                if wanted[0].start:
                    lease.keep(wanted[0].parent, wait=False)
                for number, block in enumerate(wanted):
                    if not blocks.has(block.name):
                        rows = {PLANE: bytes_of(page(number), self._layout)}
                        blocks.put(self._root, block, self._codec, self._layout, rows, lease)
                    done.append(True)
            if store.behind is not None:
                store.behind.send_chain(self._root.tenant_id, [block.name for block in wanted])
            return done

        self._safely("store", keys, write, done)
        return [*done, *[False] * (len(keys) - len(done))]

    def _refuse(self, error: KvsnapError) -> Exception:
        """With what to do in the text: SGLang shows no more of it. From now on nothing is done here."""
        self._refused = error.what
        kind = UsageError if isinstance(error, UsageError) else Unsupported
        return kind(
            f"kvsnap: {error.what}; {error.hint}" if error.hint else f"kvsnap: {error.what}"
        )

    def _say(self, kind: str, text: str) -> None:
        """Once a kind: a request must not write a line a page."""
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("kvsnap: %s (said once)", text)


def bytes_of(page: Any, layout: Layout) -> Array:
    """A page's memory as the one row of its plane, [1, bytes]; a page elsewhere is copied. Raises
    `UsageError` where it is no page of this pool."""
    _, plane = layout.planes()[PLANE]
    if not isinstance(page, torch.Tensor):
        raise UsageError(f"a page is a tensor, not {type(page).__name__}")
    flat = page.detach().cpu().contiguous().view(-1).view(torch.uint8)
    if flat.numel() != plane.row[0]:
        raise UsageError(f"a page of {flat.numel()} bytes, where the pool's have {plane.row[0]}")
    found: Array = flat.numpy().reshape(1, -1)
    return found


def stored_among(store: Store, names: Sequence[bytes]) -> set[bytes]:
    """Those of some blocks that can be read, as far as the index tells."""
    if len(names) == 1:
        return {names[0]} if store.blocks.offers(names[0]) else set()
    found: set[bytes] = set()
    for start in range(0, len(names), 500):
        part = names[start : start + 500]
        marks = ",".join("?" * len(part))
        sql = f"SELECT name FROM blocks WHERE reachable = 1 AND name IN ({marks})"
        found |= {bytes(name) for (name,) in store.index.query(sql, list(part))}
    return found
