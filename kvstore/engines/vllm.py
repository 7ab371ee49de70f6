"""The vLLM connector: prefixes are restored from a kvsnap store, and filled blocks go into it.

    vllm serve MODEL --kv-transfer-config '{
      "kv_connector": "KVSnapConnector", "kv_connector_module_path": "kvsnap.engines.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "/var/kvsnap", "capacity": "100GB"}}'

vLLM makes two of these: one beside its scheduler, which plans, and one in each worker, which moves pages.
The order in which it calls them in one step, as release 0.32 does:

    scheduler   get_num_new_matched_tokens → update_state_after_alloc → build_connector_meta
    worker      handle_preemptions (saves what earlier steps filled) → forward → start_load_kv (loads
                begin) → get_finished, get_block_ids_with_load_errors, build_connector_worker_meta
    scheduler   request_finished, update_connector_output (loads have ended)

Nothing is saved before the scheduler knows that the step that filled it was right; see vllm_planner.py.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from kvsnap.engines.served_options import ServedOptions
from kvsnap.engines.served_replaced import watch
from kvsnap.engines.vllm_check import (
    REPLACING,
    check_config,
    check_interface,
    discards_weights,
    specs_of,
)
from kvsnap.engines.vllm_identity import Identities
from kvsnap.engines.vllm_metrics import KVSnapPromMetrics, KVSnapStats
from kvsnap.engines.vllm_pages import Pages
from kvsnap.engines.vllm_plan import Facts, Plan, Rank
from kvsnap.engines.vllm_planner import Planner
from kvsnap.engines.vllm_worker import Worker
from kvsnap.formats.errors import UsageError
from kvsnap.formats.identity import Shard
from kvsnap.formats.tenant import tenant_id

_log = logging.getLogger("kvsnap")
_workers: weakref.WeakValueDictionary[str, Worker] = weakref.WeakValueDictionary()
"""Of engines whose scheduler and only worker are in this process, by engine id."""
_here: weakref.WeakSet[Worker] = weakref.WeakSet()
"""All of this process."""


class KVSnapConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """See the module. Options, as `kv_connector_extra_config`: those of `ServedOptions`. Raises at
    start, by name, for configurations that are not handled, and another interface than it knows."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_interface(vllm.__version__, KVConnectorBase_V1, Request)
        super().__init__(vllm_config, role, kv_cache_config)
        check_config(vllm_config, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._options = ServedOptions.from_mapping(extra)
        self._store = self._options.open_store()
        self._tenant = self._options.tenant()
        self._store.keys.add(self._tenant)
        self._store.check_tenant(tenant_id(self._tenant))
        self._page = specs_of(kv_cache_config.kv_cache_groups[0])[0].block_size
        self._size = self._options.block_size or _rounded_up(self._store.block_size, self._page)
        if self._size % self._page:
            raise UsageError(
                f"block_size is {self._size} tokens, vLLM's blocks have {self._page}",
                f"give a multiple of {self._page}",
            )
        _log_as_vllm()
        codec, blocks = self._options.codec, f"blocks of {self._size} tokens"
        _log.info("kvsnap: store %s, %s, codec %s (%s)", self._store.path, blocks, codec, role.name)
        self._planner: Planner | None = None
        self._worker: Worker | None = None
        self._facts: Facts | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is dropped is a smaller reuse later

    # Of a worker ----------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        kind = resolve_obj_by_qualname(self._vllm_config.parallel_config.worker_cls)
        watch(kind, REPLACING)
        watch(kind, ("sleep",), _sleeps)
        pages = Pages(kv_caches, self._kv_cache_config.num_blocks, self._size // self._page)
        layers = self._vllm_config.compilation_config.static_forward_context
        kinds = sorted({_backend(layers[name]) for name in kv_caches})
        isas = sorted({str(getattr(layers[name], "isa", "")) for name in kv_caches})
        layout = str(self._kv_cache_config.kv_cache_layout)
        facts = pages.facts(",".join(kinds), layout, ",".join(isas))
        rank, shard = _place(self._vllm_config.parallel_config)
        self._facts = Facts(pages.layout, facts, shard)
        options = self._options
        codec, buffer = options.make_codec(), options.buffer_bytes()
        self._worker = Worker(self._store, pages, rank, self._tenant, codec, buffer)
        _here.add(self._worker)
        if self._vllm_config.parallel_config.world_size == 1:
            _workers[self._kv_transfer_config.engine_id] = self._worker

    def get_handshake_metadata(self) -> Facts | None:
        return self._facts

    def handle_preemptions(self, kv_connector_metadata: Plan) -> None:
        assert self._worker is not None
        self._worker.save(kv_connector_metadata.families, kv_connector_metadata.saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """vLLM computes no token of a request before all that it waits for is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Blocks are saved whole, when they are known to be right."""

    def wait_for_save(self) -> None:
        """Pages are copied before `handle_preemptions` returns; nothing waits for the disk."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        assert self._worker is not None
        return None, self._worker.take_loaded(self._get_connector_metadata().idle)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self._worker is not None
        return self._worker.take_failed()

    def build_connector_worker_meta(self) -> Any:
        assert self._worker is not None
        return self._worker.take_done(self._get_connector_metadata().step)

    def get_kv_connector_stats(self) -> KVSnapStats | None:
        counts = self._worker.take_counts() if self._worker is not None else {}
        return KVSnapStats(counts) if counts else None

    # Of the scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Rank, Facts]) -> None:
        identities = Identities(
            self._vllm_config,
            metadata,
            self._size,
            self._store.file_digest,
            vllm.__version__,
            self._options.model,
        )
        self._planner = Planner(
            self._store,
            identities,
            self._tenant,
            self._size,
            self._page,
            trust_media_names=self._options.trust_media_names,
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._planner is not None
        found = self._planner.matched(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        assert self._planner is not None
        self._planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        assert self._planner is not None
        assert self._kv_cache_manager is not None
        blocks = self._kv_cache_manager.get_block_ids
        scheduled = scheduler_output.num_scheduled_tokens
        return self._planner.plan(scheduled, lambda request_id: blocks(request_id)[0])

    def update_connector_output(self, connector_output: Any) -> None:
        assert self._planner is not None
        for request_id in connector_output.finished_recving or ():
            self._planner.loaded(request_id)
        done = connector_output.kv_connector_worker_meta
        if done is None:
            return
        self._planner.settle(done)
        worker = _workers.get(self._kv_transfer_config.engine_id)
        # There may be no next step: an application may just stop here.
        if worker is not None:
            worker.save(self._planner.families, self._planner.last_saves())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        assert self._planner is not None
        self._planner.finish(request, block_ids)
        worker = _workers.get(self._kv_transfer_config.engine_id)
        # An engine that is put to sleep has no step before it forgets its pages.
        if worker is not None:
            worker.save(self._planner.families, self._planner.settled_saves())
        return False, None

    # Of both --------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Write what waits to be written."""
        if self._planner is not None:
            self._planner.close()
        if self._worker is not None:
            self._worker.close()
        else:
            self._store.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVSnapStats:
        return KVSnapStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVSnapPromMetrics:
        return KVSnapPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _log_as_vllm() -> None:
    """What kvsnap says stands among vLLM's own lines, in their form."""
    engine = logging.getLogger("vllm")
    if not _log.handlers and engine.handlers:
        _log.handlers, _log.propagate = list(engine.handlers), False
        _log.setLevel(engine.level)


def _rounded_up(tokens: int, page: int) -> int:
    return -(-tokens // page) * page


def _sleeps(worker: Any, level: int = 1) -> bool:
    """A sleep takes memory away that loads still write to."""
    for own in list(_here):
        own.wait_for_loads()
    return discards_weights(worker, level)


def _backend(layer: Any) -> str:
    return str(layer.get_attn_backend().get_name())


def _place(parallel: Any) -> tuple[Rank, Shard]:
    """Which part of each row, and which layers, this worker has."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor, pipeline = get_tp_group().rank_in_group, get_pp_group().rank_in_group
    shard = Shard(
        tensor_rank=tensor,
        tensor_size=parallel.tensor_parallel_size,
        pipeline_rank=pipeline,
        pipeline_size=parallel.pipeline_parallel_size,
    )
    return (pipeline, tensor), shard
