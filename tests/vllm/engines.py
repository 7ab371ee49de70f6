"""Real vLLM engines in processes of their own, and what they say they did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVE = Path(__file__).parent / "serve.py"
SECONDS = 300
PAGE = 32
"""Tokens of vLLM's blocks here; the CPU backend takes multiples of 32."""


@dataclass(frozen=True)
class Step:
    """What one step of a job gave; see serve.py."""

    found: dict[str, Any]

    @property
    def tokens(self) -> list[list[int]]:
        return self.found["tokens"]

    @property
    def logprobs(self) -> list[list[float]]:
        return self.found["logprobs"]

    @property
    def restored(self) -> int:
        """Tokens that vLLM counts as found by its connector."""
        return int(self.counted("external_prefix_cache_hits"))

    def counted(self, name: str) -> float:
        return self.found["counted"][f"vllm:{name}"]

    def same(self, other: Step) -> bool:
        """Equal tokens, and equal logprobs bit for bit."""
        return self.tokens == other.tokens and self.logprobs == other.logprobs


@dataclass(frozen=True)
class Engine:
    """What one engine gave."""

    found: dict[str, Any]

    @property
    def steps(self) -> list[Step]:
        return [Step(step) for step in self.found["steps"]]

    @property
    def refused(self) -> str:
        return self.found.get("refused", "")

    @property
    def modules(self) -> list[str]:
        return self.found["modules"]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", **more}


def begin(
    folder: Path, job: Any, *, before: Sequence[str] = (), **more: str
) -> subprocess.Popen[str]:
    """Start a process that does a job, or several one after another. `before`: a command that runs it."""
    number = len(list(folder.glob("*.json")))
    path = folder / f"{number}.json"
    path.write_text(json.dumps(job))
    command = [*before, sys.executable, "-W", "ignore", str(SERVE), str(path)]
    log = (folder / f"{number}.log").open("w")
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(**more)
    )


def end(process: subprocess.Popen[str]) -> list[Engine]:
    output, _ = process.communicate(timeout=SECONDS)
    log = Path(process.args[-1]).with_suffix(".log").read_text()
    assert process.returncode == 0, f"the engine's process ended with {process.returncode}: {log}"
    found = json.loads(output.strip().splitlines()[-1])
    return [Engine(one) for one in (found if isinstance(found, list) else [found])]


def serve(folder: Path, job: Any, *, before: Sequence[str] = (), **more: str) -> list[Engine]:
    return end(begin(folder, job, before=before, **more))


def ids(count: int, seed: int = 0) -> list[int]:
    """Token ids that look like none other's."""
    return [
        3 + (seed * 7919 + number * number * 31 + number * 17) % 2000 for number in range(count)
    ]
