"""Push and pull against what the server itself gives, and a pulled session against computing it.

    python tests/bench/sharing.py [--tokens 1500] [--rounds 3]

An S3 server (SeaweedFS) on loopback, and a folder. `plain`: the same files by the same obstore calls
from as many threads, nothing read, checked or stored. First token: `pull` and `resume`, each its own
process, against `resume` in an empty store, from the commands' own JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import kvsnap
from kvsnap.cli.bundled import bundled_model
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.transfer import AT_ONCE

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.remotes.servers import seaweed


def run(store: Path, *arguments: object) -> tuple[Any, float]:
    command = [sys.executable, "-m", "kvsnap", "--json", "--store", str(store)]
    command += [str(argument) for argument in arguments]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True)
    return json.loads(done.stdout), time.perf_counter() - started


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def plain(remote: Remote, keys: Sequence[str], data: Sequence[bytes]) -> tuple[float, float]:
    """Seconds to put all, and to get all."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        put = timed(lambda: list(pool.map(remote.put, keys, data)))
        get = timed(lambda: list(pool.map(lambda key: remote.get(key, 2**30), keys)))
    return put, get


def moving(source: Path, where: str, rounds: int, folder: Path) -> None:
    """Push and pull of the session, beside the same bytes put and got."""
    paths = sorted((source / "blocks").rglob("*.safetensors"))
    data = [path.read_bytes() for path in paths]
    total = sum(map(len, data))
    times: dict[str, list[float]] = {name: [] for name in ("put", "push", "get", "pull", "again")}
    for number in range(rounds):
        base = f"{where}/{os.getpid()}-{number}"
        with open_remote(f"{base}-plain") as remote:
            put, get = plain(
                remote, [f"blocks/{path.name[:2]}/{path.name}" for path in paths], data
            )
        with open_remote(base) as remote, kvsnap.Store(source) as store:
            times["push"].append(timed(lambda: push(store, remote, "default", "bench")))
            times["again"].append(timed(lambda: push(store, remote, "default", "bench")))
        with open_remote(base) as remote, kvsnap.Store(folder / base.replace("/", "_")) as store:
            times["pull"].append(timed(lambda: pull(store, remote, "bench")))
        times["put"].append(put)
        times["get"].append(get)
    best = {name: statistics.median(found) for name, found in times.items()}
    rate = {name: total / seconds / 1e6 for name, seconds in best.items()}
    print(
        f"| {where.partition(':')[0]} | {rate['put']:.0f} | {rate['push']:.0f}"
        f" | {best['push'] / best['put']:.2f}x | {best['again'] * 1e3:.0f} ms"
        f" | {rate['get']:.0f} | {rate['pull']:.0f} | {best['pull'] / best['get']:.2f}x |",
        flush=True,
    )


def first_token(source: Path, where: str, ids: Path, rounds: int, folder: Path) -> None:
    prompt = ["--model", bundled_model(), "--token-ids", ids, "--max-tokens", 1, "--no-save"]
    cold = [run(folder / "none", "resume", *prompt)[0]["seconds"]["first_token"] for _ in range(2)]
    run(source, "push", "bench", where)
    pulled, through = [], []
    for number in range(rounds):
        there = folder / f"pulled-{number}"
        report, _ = run(there, "pull", "bench", where)
        found, _ = run(there, "resume", "bench", "--model", bundled_model(), *prompt[4:])
        pulled.append(report["seconds"] + found["seconds"]["first_token"])
        os.environ["KVSNAP_REMOTE"] = where
        found, _ = run(folder / f"through-{number}", "resume", *prompt)
        assert found["computed_tokens"] <= 64, found
        through.append(found["seconds"]["first_token"])
        del os.environ["KVSNAP_REMOTE"]
    slow = min(cold)
    print(f"| computed | {slow:.2f} s | |")
    for name, found in (("pull, then resume", pulled), ("read through", through)):
        middle = statistics.median(found)
        print(f"| {name} | {middle:.2f} s | {slow / middle:.1f}x |", flush=True)


def main(tokens: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as server:
        folder = Path(name)
        ids = folder / "ids.json"
        ids.write_text(json.dumps(np.random.default_rng(7).integers(1000, 20000, tokens).tolist()))
        source = folder / "source"
        model = ["--model", bundled_model(), "--token-ids", ids]
        saved, _ = run(source, "save", *model, "--session", "bench")
        with seaweed(Path(server)) as s3:
            os.environ.update(s3.environment())
            url = f"s3://{s3.bucket}"
            print(f"{saved['blocks']} blocks, {saved['bytes_written'] / 1e6:.1f} MB")
            print(
                "| | put MB/s | push MB/s | push / put | push again | get MB/s | pull MB/s | pull / get |"
            )
            print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
            for where in (url, f"file://{folder}/remote"):
                moving(source, where, rounds, folder)
            print("\n| first token, from S3 | seconds | |\n| --- | ---: | ---: |")
            first_token(source, f"{url}/first", ids, rounds, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    main(options.tokens, options.rounds)
