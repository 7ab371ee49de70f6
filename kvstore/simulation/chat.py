"""Synthetic chat traffic: shared system prompts, few-shot examples, chats of several turns.

Chats begin at random times, so their turns interleave; popular system prompts get most of them.
A turn sends everything before it again. Tokens are random, as only their equality counts.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from kvsnap.kvstore.simulation.request import Chains, Request, Workload, filled

SYSTEM_TOKENS = (250, 550)
EXAMPLE_TOKENS = (100, 300)
EXAMPLE_SETS = 3
"""Sets of few-shot examples a system prompt has; a chat takes one of them, or none."""
QUESTION_TOKENS = (20, 160)
ANSWER_TOKENS = (60, 400)
"""All of these are ranges, every length in them being equally likely."""
SECONDS_BETWEEN_CHATS = 10.0
THINKING_SECONDS = (60.0, 1.0)
"""Median and sigma (log-normal) of the time between two turns: some people come back much later."""


@dataclass(frozen=True, slots=True)
class ChatTraffic:
    """How much of what. `turns` is a mean; the most popular system prompt gets 1/1 of the weight,
    the next ones 1/2, 1/3 …"""

    requests: int = 2000
    system_prompts: int = 8
    turns: int = 3
    block_size: int = 64
    seed: int = 0

    def workload(self) -> Workload:
        """The same requests for the same settings, on every machine."""
        rng = random.Random(self.seed)
        prompts = [_Prompt(rng) for _ in range(self.system_prompts)]
        weights = [1 / rank for rank in range(1, self.system_prompts + 1)]
        chains = Chains()
        requests: list[Request] = []
        turns: list[tuple[float, int, _Chat]] = []
        begins, started = 0.0, 0
        while len(requests) < self.requests:
            if not turns or begins < turns[0][0]:
                chat = _Chat(rng.choices(prompts, weights)[0].begin(rng))
                heapq.heappush(turns, (begins, started, chat))
                begins += rng.expovariate(1 / SECONDS_BETWEEN_CHATS)
                started += 1
                continue
            now, number, chat = heapq.heappop(turns)
            prompt = chat.ask(rng)
            contents = filled(prompt, self.block_size)
            shared = chat.shared_tokens // self.block_size
            requests.append(Request(chains.chain(contents), len(prompt) // 4, shared))
            if rng.random() >= 1 / self.turns:
                median, sigma = THINKING_SECONDS
                pause = median * rng.lognormvariate(0.0, sigma)
                heapq.heappush(turns, (now + pause, number, chat))
        return chains.workload("chat", self.block_size, requests)


class _Prompt:
    """A system prompt and the sets of examples that may follow it."""

    def __init__(self, rng: random.Random) -> None:
        self._system = _tokens(rng, SYSTEM_TOKENS)
        self._examples = [b"", *(_tokens(rng, EXAMPLE_TOKENS) for _ in range(EXAMPLE_SETS))]

    def begin(self, rng: random.Random) -> bytes:
        return self._system + rng.choice(self._examples)


class _Chat:
    """One conversation: what it has said so far."""

    def __init__(self, shared: bytes) -> None:
        self._said = shared
        self.shared_tokens = len(shared) // 4

    def ask(self, rng: random.Random) -> bytes:
        """The prompt of the next turn; its answer is said afterwards."""
        prompt = self._said + _tokens(rng, QUESTION_TOKENS)
        self._said = prompt + _tokens(rng, ANSWER_TOKENS)
        return prompt


def _tokens(rng: random.Random, length: tuple[int, int]) -> bytes:
    return rng.randbytes(4 * rng.randint(*length))
