"""What sealing costs: seal and open against BLAKE3 of the same bytes and a plain copy, in one run.

    python tests/bench/sealing.py [--size BYTES ...]

The ways take turns, so that a busy moment of the machine meets all of them; medians are compared.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

from blake3 import blake3

from kvsnap.formats.container import Packed, check_file_digest
from kvsnap.formats.sealed import Clear, parse_sealed, seal
from kvsnap.formats.tenant import Tenant

TENANT = Tenant(os.urandom(32))
CLEAR = Clear("block", TENANT.tenant_id, bytes(32), bytes(32), "0" * 64, 0, 64)


def ways(size: int) -> dict[str, Callable[[], object]]:
    """By name, each over a file of so many bytes. What `seal` makes is kept, as a store does until it
    is written."""
    data = os.urandom(size)
    packed = Packed((data,), size, "")
    file = memoryview(b"".join(bytes(part) for part in seal(packed, CLEAR, TENANT).buffers))
    found = parse_sealed(file)
    assert bytes(found.open(TENANT)) == data
    return {
        "copy": lambda: bytearray(data),
        "BLAKE3": lambda: blake3(data).digest(),
        "seal, with the new file's digest": lambda: seal(packed, CLEAR, TENANT),
        "check the digest of a sealed file": lambda: check_file_digest(file),
        "open (parsed and checked before)": lambda: found.open(TENANT),
        "check, parse and open": lambda: (check_file_digest(file), parse_sealed(file).open(TENANT)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, nargs="+", default=[1_500_000, 30_000_000])
    parser.add_argument("--rounds", type=int, default=101)
    asked = parser.parse_args()
    for size in asked.size:
        run = ways(size)
        times: dict[str, list[float]] = {name: [] for name in run}
        for _ in range(asked.rounds):
            for name, way in run.items():
                started = time.perf_counter()
                kept = way()
                times[name].append(time.perf_counter() - started)
                del kept
        copy, digest = median(times["copy"]), median(times["BLAKE3"])
        print(f"{size / 1e6:.1f} MB, median of {asked.rounds} rounds")
        for name, found in times.items():
            took = median(found)
            print(
                f"  {name:34} {took * 1000:8.3f} ms {size / took / 1e9:6.2f} GB/s"
                f"  {took / digest:5.2f} x BLAKE3  {took / copy:5.1f} x copy"
            )


if __name__ == "__main__":
    main()
