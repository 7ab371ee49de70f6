"""How fast the server computes a prompt, and how long a restore takes: measured on every request.

A restore takes a time of its own and a time for each token; both are fitted to what was seen, the last
ones counting most. Until enough was seen the start values below count as a few observations.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

_START_RESTORE = ((64, 0.02), (4096, 0.2))
"""(tokens, seconds): 20 ms for the files and calls, 50 us a token; measured with SmolLM2 on two cores."""
_FORGET = 0.9
_FEW = 16
"""Prompts of fewer evaluated tokens tell little of a token: a call has costs of its own."""


class Rates:
    """Of one upstream process. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.per_token: float | None = None
        """Seconds to compute one token of a prompt; None until the first was seen."""
        self._sums = [0.0] * 5  # weight, tokens, seconds, tokens squared, tokens x seconds
        for tokens, seconds in _START_RESTORE:
            self._add(tokens, seconds)

    def saw_prompt(self, timings: Mapping[str, Any]) -> None:
        """A response's own `timings`; the server measures from its first batch to its last."""
        count, milliseconds = timings.get("prompt_n"), timings.get("prompt_ms")
        if type(count) is not int or type(milliseconds) not in (int, float) or count < _FEW:
            return
        seconds = float(milliseconds) / 1000 / count  # type: ignore[arg-type]
        with self._lock:
            before = self.per_token
            self.per_token = seconds if before is None else 0.7 * before + 0.3 * seconds

    def saw_restore(self, tokens: int, seconds: float) -> None:
        """From the look-up to the server's answer."""
        with self._lock:
            self._sums = [_FORGET * value for value in self._sums]
            self._add(tokens, seconds)

    def restoring(self, tokens: int) -> float:
        """Seconds to restore a slot of so many tokens."""
        with self._lock:
            weight, n, t, nn, nt = self._sums
        spread = weight * nn - n * n
        slope = max(0.0, (weight * nt - n * t) / spread) if spread > 1e-9 else 0.0
        return max(0.0, (t - slope * n) / weight) + slope * tokens

    def computing(self, tokens: int) -> float:
        """Seconds to compute so many tokens; 0 where nothing is known."""
        return (self.per_token or 0.0) * max(0, tokens)

    def is_worth(self, held: int, stored: int) -> bool:
        """Whether to restore `stored` tokens where a slot holds the first `held` of them. Where
        computing was never seen, what is stored is restored."""
        if stored <= held:
            return False
        return self.per_token is None or self.restoring(stored) < self.computing(stored - held)

    def saved(self, reused: int, restored: int) -> float:
        """Seconds that a request did not take, by these rates: `reused` tokens were not computed, and
        for that `restored` were restored (0: they were in the slot)."""
        cost = self.restoring(restored) if restored else 0.0
        return max(0.0, self.computing(reused) - cost)

    def _add(self, tokens: float, seconds: float) -> None:
        for number, value in enumerate((1, tokens, seconds, tokens**2, tokens * seconds)):
            self._sums[number] += value
