"""SGLang's HiCache storage on a kvsnap store: `KVSnapStorage`, for `--hicache-storage-backend dynamic`.

SGLang keeps pages of KV on the device, copies them to host pages, and hands these to a storage by the
hash of their tokens and all before. Here they become blocks of kind `pages`, under an identity that
SGLang's keys lack: the weights' digest, types, the layout of host pages, ranks. Matching of single
tokens stays SGLang's. See docs/serving.md.

Its threads call in here while requests wait. None of them ever gets an exception: what cannot be used
is a page that is not there, and the log says once why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig

from kvsnap.engines.served_replaced import weights_replaced
from kvsnap.engines.sglang_chain import is_page_hash
from kvsnap.engines.sglang_identity import identity_of, served_model
from kvsnap.engines.sglang_pages import Pages
from kvsnap.engines.sglang_replaced import watch
from kvsnap.engines.sglang_start import (
    check_interface,
    check_other_pools,
    check_pool,
    installed_release,
    read_options,
)
from kvsnap.formats.errors import KvsnapError, Unsupported, UsageError
from kvsnap.formats.identity import root_of
from kvsnap.kvstore.store import Store

_T = TypeVar("_T")
_log = logging.getLogger("kvsnap")
_FAILURES = (KvsnapError, OSError, MemoryError, RuntimeError, ValueError)
"""The last two are torch's, of a page that cannot be had or does not fit, and of threads that were shut
down by a detaching while a page was to be read."""
_ADVICE = (
    "SGLang does not say what stands before a page: pages are stored alone, and any of them may be"
    ' evicted first; give "hicache_storage_pass_prefix_keys": true in the extra configuration'
)


class KVSnapStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's door to a store. `interface_v1` pages are stored as chains, others alone; both kinds
    of calls find what either stored."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """As SGLang's factory calls it. Raises what is wrong with the release or the options."""
        self.config = storage_config
        self.store: Store | None = None
        self._pages: Pages | None = None
        self._complete = False
        self._refused = False
        self._said: set[str] = set()
        try:
            check_interface(HiCacheStorage, HiCacheStorageConfig, installed_release())
            watch()
            self.options = read_options(dict(storage_config.extra_config or {}))
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
            root = root_of(
                identity_of(mem_pool_host, self.config, model, store.file_digest), tenant
            )
            store.check_tenant(root.tenant_id)
        except KvsnapError as error:
            self.close()
            raise self._refuse(error) from error
        codec = self.options.make_codec()
        self._pages = Pages(store, root, mem_pool_host, codec, self._say)
        _log.info("kvsnap: pages of root %s… in %s", root.root_id[:12], store.path)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """One that comes after the others were registered is judged at once."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if self._complete:
            self.on_host_pools_registered()

    def on_host_pools_registered(self) -> None:
        """Raises where the model has more pools than that of KV. SGLang's own threads run by now, and
        where it attaches while it serves it does not take that back: see `_safely`."""
        self._complete = True
        try:
            check_other_pools(str(name) for name in getattr(self, "registered_pools", {}))
        except KvsnapError as error:
            raise self._refuse(error) from error

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of the first pages are stored here, or in the remote."""
        prefix = _prefix_of(extra_info)
        return self._safely("look-up", keys, lambda pages: pages.count(prefix, keys), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Into the host pool's own pages; only what passed every check. SGLang uses the pages before
        the first False."""
        prefix = _prefix_of(extra_info)

        def read(pages: Pages) -> list[bool]:
            pool, size = pages.pool, pages.pool.page_size

            def land(number: int, page: torch.Tensor) -> None:
                pool.set_from_flat_data_page(int(host_indices[number * size]), page)

            return [page is not None for page in pages.read(prefix, keys, None, land)]

        return self._safely("read", keys, read, [False] * len(keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages behind those of `prefix_keys`. After one that cannot be stored none is."""
        prefix = _prefix_of(extra_info)
        if prefix is None:
            self._say("alone", _ADVICE)
        pool = self.mem_pool_host
        return self._write(
            prefix, keys, lambda n: pool.get_data_page(int(host_indices[n * pool.page_size]))
        )

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """The given flat pages, filled; None for what cannot be used, whose target is undefined."""
        targets = target_locations or [None] * len(keys)
        nothing: list[torch.Tensor | None] = [None] * len(keys)
        return self._safely(
            "read",
            keys,
            lambda pages: pages.read(None, keys, targets, lambda n, page: None),
            nothing,
        )

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
        pages, self._pages = self._pages, None
        store, self.store = self.store, None
        if pages is not None:
            pages.close()
        if store is not None:
            try:
                store.close()
            except _FAILURES as error:  # of what was to go to the remote
                _log.warning("kvsnap: %s", error)

    def _write(
        self, prefix: Sequence[str] | None, keys: list[str], page: Callable[[int], Any]
    ) -> list[bool]:
        done: list[bool] = []
        self._safely("store", keys, lambda pages: pages.write(prefix, keys, page, done), None)
        return [*done, *[False] * (len(keys) - len(done))]

    def _safely(
        self, doing: str, keys: Sequence[str], work: Callable[[Pages], _T], otherwise: _T
    ) -> _T:
        pages = self._pages
        if pages is None or self._refused or weights_replaced() or not keys:
            return otherwise
        for key in keys:
            if not is_page_hash(key):
                self._say("key", f"{key[:80]!r} is no page hash of 64 digits: passed over")
                return otherwise
        try:
            return work(pages)
        except _FAILURES as error:
            self._say(f"{doing} {type(error).__name__}", f"{doing}: {error}")
            return otherwise

    def _refuse(self, error: KvsnapError) -> KvsnapError:
        """With what to do in the text: SGLang shows no more of it. From now on nothing is done here."""
        self._refused = True
        kind = UsageError if isinstance(error, UsageError) else Unsupported
        text = f"{error.what}; {error.hint}" if error.hint else error.what
        return kind(f"kvsnap: {text}", error.hint)

    def _say(self, kind: str, text: str) -> None:
        """Once a kind: a request must not write a line a page."""
        if kind not in self._said:
            self._said.add(kind)
            _log.warning("kvsnap: %s (said once)", text)


def _prefix_of(extra_info: Any) -> list[str] | None:
    prefix: list[str] | None = getattr(extra_info, "prefix_keys", None)
    return prefix
