"""The long run: `python -m tests.fuzz.long --inputs 1000000`, from the top of the repository.

Prints a row for each target, and exits 1 where something happened that must not; each such input is
written to a file. The same seed gives the same inputs. See docs/fuzzing.md.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from tests.fuzz.run import Tally, Violation, an_input, measured, run
from tests.fuzz.targets import TARGETS, Target

MOST_GROWTH = 200
"""MiB by which this process may grow over a run: memory that libraries take is not traced."""
_MOST_KEPT = 20
"""Failing inputs of a target that are written to files."""
_COLUMNS = ("target", "inputs", "past", "accepted", "Damaged", "Unsupported", "other", "ms", "kB")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.long", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="of all targets together")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--target", action="append", help="a name of the table; may be repeated")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="a folder")
    chosen = parser.parse_args(arguments)
    targets = [one for one in TARGETS if not chosen.target or one.name in chosen.target]
    if not targets:
        parser.error(f"targets are: {', '.join(one.name for one in TARGETS)}")
    many, violations = max(1, chosen.inputs // len(targets)), 0
    _row(_COLUMNS)
    with measured(targets):
        before, files = _resident(), _open_files()
        for target in targets:
            tally, found = _fuzz(target, many, chosen.seed, chosen.failures)
            _row(_cells(target, tally))
            violations += found
        grown, left = _resident() - before, _open_files() - files
    print(f"{violations} violations; the process grew by {grown} MiB, {left} files were left open")
    return 1 if violations or grown > MOST_GROWTH or left else 0


def _fuzz(target: Target, many: int, seed: str, folder: Path) -> tuple[Tally, int]:
    tally, violations = Tally(), 0
    for number in range(many):
        data = an_input(Random(f"{seed} {target.name} {number}"), target)
        try:
            tally.add(run(target, data))
        except Violation as error:
            violations += 1
            if violations <= _MOST_KEPT:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{target.name.replace(' ', '-')}.{seed}.{number}"
                path.write_bytes(data)
                print(f"{error}\n    {path}", file=sys.stderr, flush=True)
    if tally.past < target.share * tally.inputs:
        violations += 1
        print(f"{target.name}: only {tally.past} of {tally.inputs} were past", file=sys.stderr)
    return tally, violations


def _cells(target: Target, tally: Tally) -> tuple[str, ...]:
    refused = tally.refused
    other = refused.total() - refused["Damaged"] - refused["Unsupported"]
    numbers = (
        tally.inputs, tally.past, tally.accepted, refused["Damaged"], refused["Unsupported"], other,
        round(1000 * tally.slowest), tally.memory // 1000,
    )  # fmt: skip
    return target.name, *(str(number) for number in numbers)


def _row(cells: Sequence[str]) -> None:
    print(f"{cells[0]:32}" + "".join(f"{cell:>12}" for cell in cells[1:]), flush=True)


def _resident() -> int:
    """MiB that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
