"""What the block size costs and gives: files, bytes, save and restore time, reuse lost.

    python tests/bench/block_size.py

Real: 1,500 tokens of English in the bundled model (zstd and raw). Synthetic: 2,048 tokens of rows
as large as an 8B model's (raw). Times are the least of some rounds that go over all sizes in turn.
"Lost" is what a prompt that branches off at a random token does not reuse: without token-granular
reuse half a block on average; with it nothing, but the whole block is read for its front.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from synthetic import Filled

import kvsnap
from kvsnap.cli.bundled import bundled_model
from kvsnap.engines import LlamaCpp
from kvsnap.kvstore.restore import read_blocks

SIZES = (16, 32, 64, 128, 256)


def fresh_store(folder: Path, block_size: int) -> kvsnap.Store:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = {"format": "1", "block_size": block_size, "created": 1}
    (folder / "kvsnap.json").write_text(json.dumps(settings))
    return kvsnap.Store(folder)


def real(codec: str, rounds: int) -> None:
    llm = llama_cpp.Llama(str(bundled_model()), n_ctx=2048, verbose=False)
    engine = LlamaCpp(llm)
    text = resources("kvsnap.samples").joinpath("system-prompt.md").read_text("utf-8")
    ids = engine.tokenize(text, first=True)[:1500]
    engine.evaluate(ids)
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            for size in SIZES:
                store = fresh_store(Path(name) / str(size), size)
                session = kvsnap.Session(store, engine, "s", codec=codec)
                started = time.perf_counter()
                session.save()
                saved = time.perf_counter()
                llm.reset()
                report = kvsnap.Session(store, engine, "s", codec=codec).resume(ids)
                restored = time.perf_counter()
                assert report.reused_tokens == 1499
                engine.evaluate(ids[1499:])
                paths = list(Path(name, str(size)).rglob("*.safetensors"))
                note(found, size, saved - started, restored - saved, paths)
                store.close()
    show(f"bundled model, 1500 tokens, {codec}", found)
    llm.close()


def synthetic(rounds: int) -> None:
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            for size in SIZES:
                fresh_store(Path(name) / str(size), size).close()
                filled = Filled(Path(name) / str(size), "8B", 2048, size)
                started = time.perf_counter()
                filled.save()
                saved = time.perf_counter()
                out = filled.layout.empty(2048)
                begun = time.perf_counter()
                read_blocks(
                    filled.store.blocks, filled.root, filled.wanted, filled.layout, out, 0, 2048
                )
                restored = time.perf_counter()
                paths = list(Path(name, str(size)).rglob("*.safetensors"))
                note(found, size, saved - started, restored - begun, paths)
                filled.store.close()
                shutil.rmtree(Path(name) / str(size))
    show("8B-sized rows, 2048 tokens, raw", found)


def note(
    found: dict[int, dict[str, Any]], size: int, save: float, restore: float, paths: list[Path]
) -> None:
    row = found.setdefault(size, {"save": save, "restore": restore})
    row["save"], row["restore"] = min(row["save"], save), min(row["restore"], restore)
    if "files" not in row or paths[0].exists():
        row["files"], row["bytes"] = len(paths), sum(p.stat().st_size for p in paths)


def show(title: str, found: dict[int, dict[str, Any]]) -> None:
    print(f"\n{title}\n| block | files | MB | save ms | restore ms | lost tokens, whole blocks |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size, row in found.items():
        lost = float(np.mean(np.arange(size)))
        print(
            f"| {size} | {row['files']} | {row['bytes'] / 1e6:.2f} | {row['save'] * 1e3:.0f}"
            f" | {row['restore'] * 1e3:.1f} | {lost:.1f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    real("zstd", rounds)
    real("raw", rounds)
    synthetic(rounds)
