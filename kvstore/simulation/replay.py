"""Serve a workload from empty replicas and count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap.kvstore.simulation.policies import POLICIES
from kvsnap.kvstore.simulation.replica import Replica
from kvsnap.kvstore.simulation.request import Request, Workload
from kvsnap.kvstore.simulation.routing import ROUTINGS, Load


@dataclass(frozen=True, slots=True)
class Case:
    """What to replay a workload with. `capacity`: blocks a replica; None: no limit."""

    capacity: int | None
    policy: str
    replicas: int = 1
    routing: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What came out; the fields of `kvsnap simulate --json`."""

    capacity_blocks: int | None
    policy: str
    replicas: int
    routing: str | None
    workload: str
    block_size: int
    requests: int
    blocks_asked: int
    distinct_blocks: int
    block_hits: int
    block_hit_rate: float
    shared_hit_rate: float | None
    prompt_tokens: int
    reused_tokens: int
    token_reuse: float
    evictions: int
    stored_blocks: int
    stranded_blocks: int
    stranded_asked: int
    load_imbalance: float


def replay(workload: Workload, case: Case) -> Row:
    """Every request in turn: choose a replica, count what it has, let it keep the rest."""
    make = POLICIES[case.policy]
    replicas = [make(case.capacity, workload) for _ in range(case.replicas)]
    routing = ROUTINGS[case.routing] if case.routing is not None else None
    load = Load(case.replicas)
    count = _Count(workload.block_size, case.replicas)
    for now, request in enumerate(workload.requests):
        number = routing(now, request, replicas, load.tokens) if routing is not None else 0
        count.add(request, number, replicas[number])
        replicas[number].use(request.chain, now)
        load.add(number, request.tokens)
    return count.row(workload, case, replicas)


class _Count:
    """What hit and what did not, request by request."""

    def __init__(self, block_size: int, replicas: int) -> None:
        self._block_size = block_size
        self._hits = self._shared_hits = self._reused = self._stranded = 0
        self._tokens = [0] * replicas

    def add(self, request: Request, number: int, replica: Replica) -> None:
        hits = replica.found(request.chain)
        self._hits += hits
        self._shared_hits += min(hits, request.shared)
        self._reused += request.reused(hits, self._block_size)
        self._stranded += sum(block in replica for block in request.chain[hits:])
        self._tokens[number] += request.tokens

    def row(self, workload: Workload, case: Case, replicas: Sequence[Replica]) -> Row:
        asked, tokens = workload.blocks_asked, workload.prompt_tokens
        shared = sum(request.shared for request in workload.requests)
        return Row(
            capacity_blocks=case.capacity,
            policy=case.policy,
            replicas=case.replicas,
            routing=case.routing,
            workload=workload.name,
            block_size=workload.block_size,
            requests=len(workload.requests),
            blocks_asked=asked,
            distinct_blocks=len(workload.parents),
            block_hits=self._hits,
            block_hit_rate=_share(self._hits, asked),
            shared_hit_rate=_share(self._shared_hits, shared) if shared else None,
            prompt_tokens=tokens,
            reused_tokens=self._reused,
            token_reuse=_share(self._reused, tokens),
            evictions=sum(replica.evictions for replica in replicas),
            stored_blocks=sum(map(len, replicas)),
            stranded_blocks=sum(stranded(replica, workload.parents) for replica in replicas),
            stranded_asked=self._stranded,
            load_imbalance=_share(max(self._tokens) * case.replicas, tokens),
        )


def stranded(replica: Replica, parents: Sequence[int | None]) -> int:
    """Blocks that are stored and cannot be used, as a block before them is not."""
    usable: set[int] = set()
    for block, parent in enumerate(parents):
        if block in replica and (parent is None or parent in usable):
            usable.add(block)
    return len(replica) - len(usable)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
