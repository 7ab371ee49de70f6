"""What is replayed: requests as chains of numbered blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `shared`: blocks at its front that come from a shared prompt, where known."""

    chain: tuple[int, ...]
    tokens: int
    shared: int = 0

    def reused(self, hits: int, block_size: int) -> int:
        """Tokens that are not computed after `hits` blocks: the last one always is, as in a resume,
        for a restored cache has no logits; and the last block may be partly filled."""
        return max(0, min(hits * block_size, self.tokens - 1))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival, and what is known of their blocks."""

    name: str
    block_size: int
    requests: tuple[Request, ...]
    parents: tuple[int | None, ...]
    """Number of a block → number of the block before it, which is always smaller."""

    @property
    def blocks_asked(self) -> int:
        return sum(len(request.chain) for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.tokens for request in self.requests)


class Chains:
    """Numbers blocks as their names do: equal number = equal content after an equal prefix."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int | None, Hashable], int] = {}
        self._parents: list[int | None] = []

    def chain(self, contents: Iterable[Hashable]) -> tuple[int, ...]:
        """The numbers of one prompt's blocks, from what each of them holds."""
        numbers: list[int] = []
        parent: int | None = None
        for content in contents:
            number = self._numbers.setdefault((parent, content), len(self._parents))
            if number == len(self._parents):
                self._parents.append(parent)
            numbers.append(number)
            parent = number
        return tuple(numbers)

    def workload(self, name: str, block_size: int, requests: Iterable[Request]) -> Workload:
        return Workload(name, block_size, tuple(requests), tuple(self._parents))


def filled(token_bytes: bytes, block_size: int) -> list[bytes]:
    """Token ids of four bytes each, cut into filled blocks; the tail is left out, as it is never a
    stored block."""
    step = 4 * block_size
    return [token_bytes[at : at + step] for at in range(0, len(token_bytes) - step + 1, step)]
