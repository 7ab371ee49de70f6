"""One input given to one target, and what must hold of that."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvsnap.formats import rowset
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import KvsnapError
from tests.fuzz.targets import Target

DECODED = 2**18
"""What `rowset.MAX_DECODED` is set to meanwhile: with the real 2 GiB every run would need as much."""
CONSTANT = 4 * DECODED + 2**20
"""Bytes that any input may take besides its target's factor: decoders take three times the rows that they
make."""
LONGEST = 10.0
"""Seconds of this process' processor time, for inputs of at most some 100 kB."""
MOST_TOLD = 1000
"""Characters of a reason."""


class Violation(Exception):
    """What must not happen; `data` is the input."""

    def __init__(self, target: Target, data: bytes, what: str) -> None:
        super().__init__(f"{target.name}: {what} (input of {len(data)} bytes)")
        self.target, self.data = target, data


@dataclass(frozen=True)
class Outcome:
    """`refused`: class of the first refusal; empty where all of it was accepted."""

    past: bool
    refused: str
    seconds: float
    memory: int


@dataclass
class Tally:
    """Of all inputs of one target."""

    inputs: int = 0
    past: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    memory: int = 0

    @property
    def accepted(self) -> int:
        return self.inputs - self.refused.total()

    def add(self, outcome: Outcome) -> None:
        self.inputs += 1
        self.past += outcome.past
        if outcome.refused:
            self.refused[outcome.refused] += 1
        self.slowest = max(self.slowest, outcome.seconds)
        self.memory = max(self.memory, outcome.memory)


@contextlib.contextmanager
def measured(targets: Sequence[Target]) -> Iterator[None]:
    """Around all runs: memory is traced, warnings are errors, and no file's rows are large. What valid
    inputs make stay in memory (modules, tables) is there before."""
    for target in targets:
        for data in target.seeds():
            _read(target, data)
    before, rowset.MAX_DECODED = rowset.MAX_DECODED, DECODED
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        tracemalloc.stop()
        rowset.MAX_DECODED = before


def an_input(random: Random, target: Target) -> bytes:
    """A valid one, changed."""
    valid = target.seeds()
    return target.mutate(random, random.choice(valid), valid)


def run(target: Target, data: bytes) -> Outcome:
    """Inside of `measured`. Raises `Violation`."""
    past = target.past(data)
    get_codec.cache_clear()
    floats = np.geterr()
    tracemalloc.reset_peak()
    held, _ = tracemalloc.get_traced_memory()
    start = time.process_time()
    refused = _read(target, data)
    seconds = time.process_time() - start
    memory = tracemalloc.get_traced_memory()[1] - held
    if memory > target.factor * len(data) + CONSTANT:
        raise Violation(target, data, f"{memory} bytes of memory")
    if seconds > LONGEST:
        raise Violation(target, data, f"{seconds:.1f} s")
    if np.geterr() != floats:
        raise Violation(target, data, "numpy's error state is another")
    return Outcome(past, refused, seconds, memory)


def _read(target: Target, data: bytes) -> str:
    """Parse, then use what was parsed; each use, as none may rely on another's refusal."""
    try:
        found = target.parse(data)
    except target.refusals as error:
        _check_reason(target, data, error)
        return type(error).__name__
    except Exception as error:
        raise Violation(target, data, f"{type(error).__name__}: {error}"[:300]) from error
    refused = ""
    for use in target.then:
        try:
            use(found)
        except target.refusals as error:
            _check_reason(target, data, error)
            refused = refused or type(error).__name__
        except Exception as error:
            what = f"{getattr(use, '__name__', use)}: {type(error).__name__}: {error}"
            raise Violation(target, data, what[:300]) from error
    return refused


def _check_reason(target: Target, data: bytes, error: KvsnapError) -> None:
    """One line that can be shown; and no failure of a codec in the guise of a refusal."""
    if not error.what or len(error.what) > MOST_TOLD or not error.what.isprintable():
        raise Violation(
            target, data, f"a reason of {len(error.what)}: {error.what[:300]!a}"
        ) from error
    cause = error.__cause__
    if "failed on plane" in error.what or isinstance(cause, Warning | MemoryError):
        raise Violation(target, data, f"{error.what} ({type(cause).__name__})") from error
