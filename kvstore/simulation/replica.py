"""The blocks that one replica keeps: what a policy is to the simulator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile

NO_LIMIT = 2**63


class Replica(ABC):
    """At most `capacity` blocks, under one policy. A better policy is one more subclass.

    Blocks of the request in hand stay. Of a request with more blocks than there is room for the
    first ones are kept: without them the others would be of no use.
    """

    def __init__(self, capacity: int | None) -> None:
        self.capacity = NO_LIMIT if capacity is None else capacity
        self.evictions = 0

    @abstractmethod
    def __contains__(self, block: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def use(self, chain: Sequence[int], now: int) -> None:
        """Serve request number `now`: note what it used, keep what it computed, make room."""

    def found(self, chain: Sequence[int]) -> int:
        """Stored blocks at the front of `chain`. Only these can be used; asking changes nothing."""
        return sum(1 for _ in takewhile(self.__contains__, chain))
