"""What it costs that a save survives a power cut: ways to sync the blocks of one save, in one run.

    python tests/bench/durability.py [--folder DIR]

The folder must be on the disk in question; in a memory file system syncing costs nothing.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

from kvsnap.formats.container import Packed
from kvsnap.kvstore import files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--size", type=int, default=1_475_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    data = os.urandom(asked.size)
    ways = {
        "no sync": lambda paths: None,
        "one sync a block, as it is written": None,
        "all at the end, one by one": lambda paths: [files.sync_all([path]) for path in paths],
        "all at the end, eight at once (kvsnap)": files.sync_all,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, sync in ways.items():
            folder = Path(tempfile.mkdtemp(dir=asked.folder))
            os.sync()
            started = time.perf_counter()
            paths = []
            for _ in range(asked.blocks):
                path = folder / secrets.token_hex(8)
                files.write_file(path, Packed((data,), len(data), ""))
                if sync is None:
                    files.sync_all([path])
                paths.append(path)
            if sync is not None:
                sync(paths)
            if name != "no sync":
                files.sync_all([folder])
            times[name].append(time.perf_counter() - started)
            shutil.rmtree(folder)
    base = median(times["no sync"])
    print(f"{asked.blocks} blocks of {asked.size / 1e6:.2f} MB, median of {asked.rounds} rounds")
    for name, found in times.items():
        print(f"{name:40} {median(found) * 1000:8.1f} ms   {median(found) / base:5.1f}x")


if __name__ == "__main__":
    main()
