"""KVSnapStorage beside SGLang's own HiCacheFile, on the same pages in one run: seconds and bytes.

    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=tests/sglang/shim .venv-sglang/bin/python \\
        tests/bench/sglang_hicache.py pages [--pages 128] [--layers 16] [--rounds 5]
    ... tests/bench/sglang_hicache.py engine [--tokens 1024] [--rounds 5]

`pages`: no engine. Both storages get the pages of one real host pool by the calls that SGLang's
controller makes for each: from host pages to disk and back into other host pages. HiCacheFile writes no
digest and checks none. Its files are in the system's cache when they are read, and so are kvsnap's.

`engine`: the real engine on the CPU with a model of SmolLM2-135M's shape and random weights. Cold: new
prompts, by turns with no storage, HiCacheFile and kvsnap. Restored: the same after a flush. Figures are
seconds of whole requests of one new token; cold ones are compared round by round.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


FILES = (".safetensors", ".bin")


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in FILES)


class ByFile:
    """HiCacheFile, by the controller's generic calls."""

    def __init__(self, pool: Any, folder: Path, config: Any) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        config.extra_config = {"file_storage_path": str(folder)}
        self.pool, self.storage = pool, HiCacheFile(config)

    def set(self, keys: list[str], indices: Any) -> None:
        size = self.pool.page_size
        pages = [self.pool.get_data_page(int(i)) for i in indices[::size]]
        assert self.storage.batch_set(keys, pages)

    def get(self, keys: list[str], indices: Any) -> None:
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        found = self.storage.batch_get(keys, targets)
        for index, page in zip(indices[:: self.pool.page_size], found, strict=True):
            self.pool.set_from_flat_data_page(int(index), page)


class ByKvsnap:
    """KVSnapStorage, by the calls of interface_v1."""

    def __init__(self, pool: Any, folder: Path, codec: str) -> None:
        from kvsnap.engines import sglang as engine
        from tests.sglang.pools import behind, make_storage, model_in

        model = model_in(folder / "model")
        engine.served_model = lambda given: model  # type: ignore[assignment]
        self.storage = make_storage(pool, {"store": str(folder / "store"), "codec": codec})
        self.start = behind([])

    def set(self, keys: list[str], indices: Any) -> None:
        assert all(self.storage.batch_set_v1(keys, indices, self.start))

    def get(self, keys: list[str], indices: Any) -> None:
        assert self.storage.batch_exists(keys, self.start) == len(keys)
        assert all(self.storage.batch_get_v1(keys, indices, self.start))


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_pages(told: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from tests.sglang.pools import host_pool, indices, page_hashes, pages_of

    count = told.pages
    pool = host_pool(
        told.layout, layers=told.layers, heads=8, dim=64, pages=2 * count, page_size=64
    )
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, False, "model")
    kinds: dict[str, Callable[[Path], Any]] = {
        "HiCacheFile": lambda at: ByFile(pool, at, config),
        "kvsnap raw": lambda at: ByKvsnap(pool, at, "raw"),
        "kvsnap zstd": lambda at: ByKvsnap(pool, at, "zstd"),
    }
    setting: dict[str, list[float]] = {kind: [] for kind in kinds}
    getting: dict[str, list[float]] = {kind: [] for kind in kinds}
    sizes: dict[str, int] = {}
    source, target = indices(0, count, 64), indices(count, count, 64)
    right = pages_of(pool, 0, count)
    for number in range(told.rounds):
        keys = page_hashes(count, f"{number} ")
        for kind in list(kinds)[number % 3 :] + list(kinds)[: number % 3]:
            at = folder / kind.replace(" ", "-") / str(number)
            by = kinds[kind](at)
            setting[kind].append(timed(lambda by=by, keys=keys: by.set(keys, source)))
            by.get(keys, target)
            getting[kind].append(timed(lambda by=by, keys=keys: by.get(keys, target)))
            assert pages_of(pool, count, count) == right
            sizes[kind] = bytes_below(at)
            if kind != "HiCacheFile":
                sizes[kind] -= bytes_below(at / "model")
                by.storage.close()
            shutil.rmtree(at)
    size = len(right[0]) * count
    return {
        "pages": count,
        "page_bytes": len(right[0]),
        "layout": told.layout,
        **{
            kind: {
                "set_GB_s": size / median(setting[kind]) / 1e9,
                "get_GB_s": size / median(getting[kind]) / 1e9,
                "set_seconds_to_file": median(setting[kind]) / median(setting["HiCacheFile"]),
                "get_seconds_to_file": median(getting[kind]) / median(getting["HiCacheFile"]),
                "bytes_to_pages": sizes[kind] / size,
            }
            for kind in kinds
        },
    }


def measure_engine(told: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One engine process; storages are attached and detached between requests."""
    from tests.sglang import engine_worker
    from tests.sglang.engine_worker import Run

    engine_worker.NEW_TOKENS = 1
    subprocess.run(
        [sys.executable, ROOT / "tests/tiny_models.py", folder / "model", "smol"],
        check=True,
        capture_output=True,
    )
    run = Run({"model": str(folder / "model"), "engine": {"log_level": "error", "page_size": 64}})
    manager = run.engine.tokenizer_manager

    def attach(kind: str, number: int) -> None:
        if kind == "kvsnap":
            done = run.attach({"store": str(folder / f"store-{number}")})
        elif kind == "HiCacheFile":
            extra = json.dumps({"file_storage_path": str(folder / f"file-{number}")})
            reply = run.wait_for(manager.attach_hicache_storage("file", extra))
            done = [reply.success, reply.message]
        else:
            return
        assert done[0], done

    kinds = ["none", "HiCacheFile", "kvsnap"]
    cold: dict[str, list[float]] = {kind: [] for kind in kinds}
    restored: dict[str, list[float]] = {kind: [] for kind in kinds[1:]}
    whole = told.tokens // 64 * 64
    for number in range(-1, told.rounds):
        for kind in kinds[number % 3 :] + kinds[: number % 3]:
            # Each has prompts of its own: nothing is found from before.
            ids = [(7 * n * (number + 2) + len(kind)) % 1900 + 5 for n in range(told.tokens + 1)]
            attach(kind, number)
            run.generate([ids[::-1][:64]])  # nothing is set up in the request that counts
            (first,) = run.generate([ids])
            time.sleep(1.0)  # backups are done
            assert first["cached"] == 0
            run.flush()
            if kind != "none":
                (again,) = run.generate([ids])
                assert again["details"].get("storage") == whole, again
                restored[kind].append(again["seconds"])
                run.flush()
                run.detach()
            cold[kind].append(first["seconds"])
    run.engine.shutdown()
    for values in (*cold.values(), *restored.values()):
        del values[0]  # the first round warms up
    return {
        "tokens": told.tokens,
        "rounds": told.rounds,
        "cold_seconds": {kind: median(values) for kind, values in cold.items()},
        "cold_to_none": {
            kind: [round(a / b, 3) for a, b in zip(cold[kind], cold["none"], strict=True)]
            for kind in kinds[1:]
        },
        "cold_to_none_median": {
            kind: median([a / b for a, b in zip(cold[kind], cold["none"], strict=True)])
            for kind in kinds[1:]
        },
        "restored_seconds": {kind: median(values) for kind, values in restored.items()},
        "restored_to_cold": {
            kind: median(values) / median(cold["none"]) for kind, values in restored.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["pages", "engine"])
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--layout", default="page_first_direct")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvsnap-bench-") as folder:
        measure = measure_pages if told.what == "pages" else measure_engine
        print(json.dumps(measure(told, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
