"""vLLM's own scheduler with the connector, and stamped ranks in the place of a model, in one process.

What is vLLM's: the scheduler (and the one for async scheduling), the pool of pages with its prefix cache,
the scheduler's side of the connector. What stands in: the executor and the model runner, in the order in
which vLLM's call the connector. With async scheduling a step is built and executed before the output of
the one before is looked at.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvsnap.engines.vllm import _workers
from kvsnap.engines.vllm_pages import Pages
from kvsnap.engines.vllm_plan import Facts, Move
from kvsnap.engines.vllm_worker import Worker
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.identity import Shard
from kvsnap.kvstore.store import Store
from tests.vllm.serve import CONNECTOR
from tests.vllm.stamps import LAYERS, STATE, Part, Right, Running, StampedRank, sample

PAGE = 4
_numbers = itertools.count()


def make_config(model: Path) -> Any:
    """A VllmConfig, which takes a second: one for all."""
    connector = KVTransferConfig(**CONNECTOR, kv_connector_extra_config={})
    args = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=32,
        max_model_len=256,
        kv_transfer_config=connector,
    )
    init_none_hash(sha256)
    return args.create_engine_config()


class Lockstep:
    """One engine. `size`: tokens of a stored block."""

    def __init__(
        self,
        config: Any,
        store: Path,
        *,
        pages: int = 24,
        ranks: int = 2,
        size: int = PAGE,
        budget: int = 16,
        in_flight: int = 1,
        in_process: bool = False,
        policy: str = "fcfs",
        options: dict[str, Any] | None = None,
    ) -> None:
        self.right, self.in_flight = Right(ranks), in_flight
        extra = {"store": str(store), "block_size": size, **(options or {})}
        config.kv_transfer_config.kv_connector_extra_config = extra
        config.kv_transfer_config.engine_id = f"lockstep-{next(_numbers)}"
        config.parallel_config.world_size = ranks
        config.scheduler_config.async_scheduling = in_flight > 1
        config.scheduler_config.max_num_batched_tokens = budget
        config.scheduler_config.max_num_scheduled_tokens = budget
        config.scheduler_config.max_num_seqs = 8
        config.scheduler_config.policy = policy
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = pages, PAGE
        names = [f"layer{number}" for number in range(LAYERS)]
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=1, head_size=STATE // 2, dtype=torch.uint8
        )
        caches = KVCacheConfig(pages, [], [KVCacheGroupSpec(names, spec)])
        kind = AsyncScheduler if in_flight > 1 else Scheduler
        self.scheduler = kind(
            config, caches, StructuredOutputManager(config), block_size=PAGE, log_stats=True
        )
        self.connector = self.scheduler.get_kv_connector()
        self.ranks = [StampedRank(rank, pages, PAGE) for rank in range(ranks)]
        self.workers, facts = [], {}
        for own in self.ranks:
            view = Pages(dict(zip(names, own.tensors, strict=True)), pages, size // PAGE)
            rank = (0, own.rank)
            shard = Shard(tensor_rank=own.rank, tensor_size=ranks)
            facts[rank] = Facts(view.layout, (), shard)
            codec = get_codec("raw")
            self.workers.append(Worker(Store(store), view, rank, None, codec, 1 << 20))
        if in_process:
            _workers[config.kv_transfer_config.engine_id] = self.workers[0]
        self.connector.set_xfer_handshake_metadata_pp_aware(facts)
        self.hasher = get_request_block_hasher(PAGE, sha256)
        self.all: dict[str, Request] = {}
        """All requests there ever were."""
        self.running: dict[str, Running] = {}
        self.flying: deque[tuple[Any, Any]] = deque()
        self.loads: dict[str, Move] = {}
        self.looks: Callable[[], bool] = lambda: True
        """Whether a rank finds its loads ended in this step."""
        self.together = KVOutputAggregator(ranks)
        self.loaded = 0
        """Tokens that were read from the store into pages, and compared."""

    # What may happen ------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        most: int,
        salt: str | None = None,
        *,
        priority: int = 0,
        anew: bool = False,
    ) -> str:
        """`anew`: it asks to have all of its prompt computed, as who wants its logprobs does."""
        name = f"r{len(self.all)}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True),
            pooling_params=None,
            cache_salt=salt,
            priority=priority,
            block_hasher=self.hasher,
        )
        request.skip_reading_prefix_cache = anew
        self.all[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget_prefixes(self) -> None:
        """And preempt all, where vLLM can: not while steps are under way, or loads have pages."""
        pages = self.scheduler.kv_cache_manager.get_block_ids
        waiting = set(self.scheduler.requests) - {one.request_id for one in self.scheduler.running}
        busy = self.flying or any(pages(name)[0] for name in waiting)
        self.scheduler.reset_prefix_cache(reset_running_requests=not busy)

    def flush(self) -> None:
        """Wait for all threads that read or write the store."""
        for worker in self.workers:
            wait(worker._loading.values())
            worker.writer.flush()

    def step(self) -> None:
        """As `EngineCore.step_with_batch_queue`: fill the queue, then look at the oldest output."""
        if self.scheduler.has_requests():
            built = self.scheduler.schedule()
            self.flying.append((built, self._execute(built)))
            if len(self.flying) < self.in_flight and built.total_num_scheduled_tokens:
                return
        if self.flying:
            self.scheduler.update_from_output(*self.flying.popleft())

    def finish(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_requests() or self.flying:
            self.step()
        self.flush()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.close()

    # What stands in for the executor --------------------------------------------------------------

    def _execute(self, built: Any) -> ModelRunnerOutput:
        plan = built.kv_connector_metadata
        for worker in self.workers:
            worker.save(plan.families, plan.saves)
        self._update_states(built)
        assert not built.has_sync_kv_loads, "a step may stand on a load that fails"
        names, sampled = self._forward(built)
        self.loads |= {move.request_id: move for move in plan.loads}
        outputs = []
        for worker, rank in zip(self.workers, self.ranks, strict=True):
            worker.load(plan)
            loaded = self._end_of_loads(worker) if self.looks() else set()
            failed = worker.take_failed()
            for request_id in loaded:
                self._check_load(self.loads[request_id], rank, failed)
            connector = KVConnectorOutput(
                invalid_block_ids=failed,
                finished_recving=loaded,
                kv_connector_worker_meta=worker.take_done(plan.step),
            )
            outputs.append(
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: number for number, name in enumerate(names)},
                    sampled_token_ids=sampled,
                    kv_connector_output=connector,
                )
            )
        return self.together.aggregate(outputs)

    def _end_of_loads(self, worker: Worker) -> set[str]:
        wait(worker._loading.values())
        return worker.take_loaded(idle=False)

    def _update_states(self, built: Any) -> None:
        for name in built.finished_req_ids:
            self.running.pop(name, None)
        for new in built.scheduled_new_reqs:
            salt = self.all[new.req_id].cache_salt
            self.running[new.req_id] = Running(
                salt, list(new.prompt_token_ids), list(new.block_ids[0])
            )
        cached = built.scheduled_cached_reqs
        for name, pages, outputs in zip(
            cached.req_ids, cached.new_block_ids, cached.num_output_tokens, strict=True
        ):
            one = self.running[name]
            if name in cached.resumed_req_ids:
                one.tokens, one.pages = list(cached.all_token_ids[name]), list(pages[0])
            elif pages is not None:
                one.pages += pages[0]
            # What was sampled on top of a failed load is taken back.
            del one.tokens[self.all[name].num_prompt_tokens + outputs :]

    def _forward(self, built: Any) -> tuple[list[str], list[list[int]]]:
        starts = {new.req_id: new.num_computed_tokens for new in built.scheduled_new_reqs}
        cached = built.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names, parts = list(built.num_scheduled_tokens), []
        for name in names:
            one, start = self.running[name], starts[name]
            stop = start + built.num_scheduled_tokens[name]
            one.tokens += [0] * (stop - len(one.tokens))
            parts.append(Part(one, start, stop))
        last = [rank.forward(parts) for rank in self.ranks]
        sampled: list[list[int]] = []
        for part, *states in zip(parts, *last, strict=True):
            whole = part.stop == len(part.request.tokens)
            sampled.append([sample(states)] if whole else [])
            part.request.tokens += sampled[-1]
        return names, sampled

    # What must hold -------------------------------------------------------------------------------

    def _check_load(self, move: Move, rank: StampedRank, failed: set[int]) -> None:
        """What was loaded and not reported as failed is right."""
        request = self.all[move.request_id]
        first = move.start // PAGE
        stop = first + len(move.pages)
        tokens = list(request.all_token_ids)[: stop * PAGE]
        states = self.right.states(request.cache_salt, tokens, rank.rank)
        for number in range(move.held, len(move.pages)):
            if move.pages[number] in failed:
                continue
            at = (first + number) * PAGE
            for view, right in zip(rank.views, states, strict=True):
                found = view[move.pages[number], 0]
                assert np.array_equal(found, right[at : at + PAGE]), (
                    f"{move.request_id}: the page of token {at} was loaded wrong"
                )
            self.loaded += PAGE
