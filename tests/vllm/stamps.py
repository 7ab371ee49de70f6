"""KV whose bytes tell of which tokens they are: what a page must hold, and a rank that fills it so.

The state of a token is a digest over the states of all before it, as they stand in the pages, and its
id: on top of what was not loaded, or was another request's, stands garbage, as it does under attention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

LAYERS, STATE = 2, 8
"""Layers of one rank, and bytes of one token's state in one layer."""


def seed(salt: str | None, rank: int) -> bytes:
    """What the first token stands on; in no model, but whoever reads another salt's KV shall be seen."""
    return f"{salt!r} {rank}".encode()


def state(before: hashlib._Hash, token: int) -> np.ndarray:
    """Of a token, in all layers: [LAYERS, STATE]."""
    own = before.copy()
    own.update(token.to_bytes(4, "little"))
    return np.frombuffer(own.digest(), dtype=np.uint8)[: LAYERS * STATE].reshape(LAYERS, STATE)


class Right:
    """What the tokens of a sequence must have as states, on each rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._known: dict[tuple[str | None, tuple[int, ...]], np.ndarray] = {}

    def states(self, salt: str | None, tokens: Sequence[int], rank: int) -> np.ndarray:
        """[LAYERS, tokens, STATE]."""
        key = (f"{salt!r} {rank}", tuple(tokens))
        if key not in self._known:
            hasher = hashlib.sha256(seed(salt, rank))
            found = np.empty((LAYERS, len(tokens), STATE), dtype=np.uint8)
            for position, token in enumerate(tokens):
                found[:, position] = state(hasher, token)
                hasher.update(found[:, position].tobytes())
            self._known[key] = found
        return self._known[key]

    def continued(self, salt: str | None, prompt: Sequence[int], count: int) -> list[int]:
        """What greedy sampling gives after a prompt."""
        tokens = list(prompt)
        for _ in range(count):
            last = [self.states(salt, tokens, rank)[:, -1] for rank in range(self.ranks)]
            tokens.append(sample(last))
        return tokens[len(prompt) :]


def sample(last: Sequence[np.ndarray]) -> int:
    """The next token, by the last one's states of all ranks; few differ, so that requests meet."""
    return int(sum(int(states[0, 0]) for states in last) % 3)


@dataclass
class Running:
    """A request in the model runner."""

    salt: str | None
    tokens: list[int]
    pages: list[int]


@dataclass
class Part:
    """What of a request one step computes: positions [start, stop)."""

    request: Running
    start: int
    stop: int


class StampedRank:
    """The KV caches of one rank: [pages, 1, tokens of a page, STATE] for each layer."""

    def __init__(self, rank: int, pages: int, page: int) -> None:
        self.rank, self.page = rank, page
        noise = np.random.default_rng(rank).integers(0, 256, (LAYERS, pages, 1, page, STATE))
        self.tensors = [torch.from_numpy(layer) for layer in noise.astype(np.uint8)]
        self.views = [tensor.numpy() for tensor in self.tensors]

    def at(self, request: Running, position: int) -> np.ndarray:
        """[LAYERS, STATE] of a request's token, as it stands in its page."""
        page, slot = request.pages[position // self.page], position % self.page
        return np.stack([view[page, 0, slot] for view in self.views])

    def forward(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Compute, position by position: in a model, too, one request of a step sees what another one
        of the same step writes into a page that they share. Returns the states of the last tokens."""
        hashers = {}
        for position in sorted({p for part in parts for p in range(part.start, part.stop)}):
            for number, part in enumerate(parts):
                if not part.start <= position < part.stop:
                    continue
                if number not in hashers:
                    hashers[number] = hashlib.sha256(seed(part.request.salt, self.rank))
                    for before in range(position):
                        hashers[number].update(self.at(part.request, before).tobytes())
                own = state(hashers[number], part.request.tokens[position])
                page, slot = part.request.pages[position // self.page], position % self.page
                for view, layer in zip(self.views, own, strict=True):
                    view[page, 0, slot] = layer
                hashers[number].update(own.tobytes())
        return [self.at(part.request, part.stop - 1) for part in parts]
