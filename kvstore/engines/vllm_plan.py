"""What the scheduler's side of the vLLM connector and its workers tell each other.

vLLM pickles these between its own processes; nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsnap.formats.identity import Shard
from kvsnap.formats.layout import Layout
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.wanted import Wanted

Rank = tuple[int, int]
"""(pipeline parallel rank, tensor parallel rank), as vLLM gathers what workers say at start."""
Family = Mapping[Rank, str]
"""The canonical identity of each rank's blocks; another one with an adapter."""


@dataclass(frozen=True)
class Facts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What one rank found out about its KV caches."""

    layout: Layout
    overrides: tuple[tuple[str, str], ...]
    shard: Shard


@dataclass(frozen=True)
class Move:
    """Consecutive blocks of one request, to load or to save."""

    request_id: str
    family: int
    """Which of the plan's families."""
    start: int
    """Position of the first token."""
    token_ids: TokenIds
    """Of all blocks, one after the other."""
    extras: Sequence[bytes]
    """Of each block."""
    names: Mapping[Rank, Sequence[bytes]]
    """Of each rank's blocks, that of the block before them first."""
    pages: Sequence[int]
    """vLLM's block ids of all tokens."""
    held: int = 0
    """So many of `pages`, at the front, the engine has: they are not loaded."""
    chain: Mapping[Rank, Sequence[bytes]] = field(default_factory=dict)
    """The names from the sequence's first block on, where blocks go on to a remote."""

    def wanted(self, rank: Rank) -> list[Wanted]:
        """The blocks with what each must say of itself, as one rank stores them."""
        names, size = self.names[rank], len(self.token_ids) // len(self.extras)
        return [
            Wanted(
                names[number + 1],
                names[number],
                self.start + number * size,
                self.token_ids[number * size : (number + 1) * size],
                extras,
            )
            for number, extras in enumerate(self.extras)
        ]


@dataclass
class Plan(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers are to do in one step: `saves` before anything else, as vLLM may give their
    pages to other requests from now on; `loads` begin when its forward pass was launched."""

    step: int
    idle: bool = False
    """The step computes nothing: all requests wait."""
    families: Sequence[Family] = ()
    saves: list[Move] = field(default_factory=list)
    loads: list[Move] = field(default_factory=list)


@dataclass
class Done(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """That a step was executed. `missed`: names of blocks that could not be loaded. `replaced`: the
    rank's weights are not those any more that it started with."""

    step: int
    missed: list[bytes] = field(default_factory=list)
    replaced: bool = False

    def aggregate(self, other: Done) -> Done:
        """Of all ranks: the step that the slowest one executed, and what any of them missed."""
        replaced = self.replaced or other.replaced
        return Done(min(self.step, other.step), self.missed + other.missed, replaced)
