"""What a response says of itself: its `timings`, found in its body as it passes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_KEPT = 65_536
"""Bytes of a stream's end that are kept; its last events, where the timings stand, take a few hundred."""


@dataclass
class Outcome:
    """How a forwarded request went. `timings` is empty where the response has none, or was cut off."""

    status: int = 0
    complete: bool = False
    timings: Mapping[str, Any] = field(default_factory=dict)

    def count(self, name: str) -> int | None:
        value = self.timings.get(name)
        return value if type(value) is int and value >= 0 else None


class Tail:
    """The end of a stream."""

    def __init__(self) -> None:
        self._end = b""

    def add(self, chunk: bytes) -> None:
        self._end = (self._end + chunk)[-_KEPT:]

    def timings(self) -> Mapping[str, Any]:
        """Those of the last event that has any."""
        for line in reversed(self._end.split(b"\n")):
            if line.startswith(b"data:") and b'"timings"' in line:
                return timings_of(line[5:])
        return {}


def timings_of(body: bytes) -> Mapping[str, Any]:
    """Those of a whole response, {} where it has none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    timings = found.get("timings") if isinstance(found, dict) else None
    return timings if isinstance(timings, dict) else {}
