"""Restore throughput, as ratios in one run, page cache warm.

    python tests/bench/restore.py

1. Raw blocks (read, digest checked, rows in one buffer, all cores) against safetensors'
   `load_file` of one file of the same bytes with `.clone()` of each tensor (it maps the file: the
   clone is what reads it), and against the same done block by block. Twice: into fresh memory, as a
   new process has it, and into memory that the allocator kept from the round before.
2. The whole way into llama.cpp against `llama_state_seq_load_file` of the same tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np
from safetensors.torch import load_file, save_file
from synthetic import Filled, best_of

import kvsnap
from kvsnap.cli.bundled import bundled_model
from kvsnap.engines import LlamaCpp
from kvsnap.kvstore.restore import read_blocks


def blocks_against_safetensors(shape: str, tokens: int, block_size: int, rounds: int) -> None:
    import torch

    with tempfile.TemporaryDirectory() as folder:
        filled = Filled(Path(folder) / "store", shape, tokens, block_size)
        filled.save()
        size = sum(array.nbytes for array in filled.rows.values())
        whole = Path(folder) / "whole.safetensors"
        save_file({n: torch.from_numpy(a.view(np.int16)) for n, a in filled.rows.items()}, whole)
        files = [filled.store.place.block(name) for name in filled.names]

        def restore() -> None:
            out = filled.layout.empty(tokens)
            done, miss = read_blocks(
                filled.store.blocks, filled.root, filled.wanted, filled.layout, out, 0, tokens
            )
            assert (done, miss) == (tokens, None)

        def one_file() -> None:
            _ = {name: tensor.clone() for name, tensor in load_file(whole).items()}

        def block_files() -> None:
            _ = [{n: t.clone() for n, t in load_file(path).items()} for path in files]

        ours, one, blocks = best_of(rounds, restore, one_file, block_files)
        print(
            f"{shape}, {tokens} tokens, {size / 1e6:.0f} MB, blocks of {block_size}:"
            f" kvsnap {size / ours / 1e9:.2f} GB/s; one file + clone {size / one / 1e9:.2f} GB/s"
            f" (kvsnap takes {ours / one:.2f}x of it); block files + clone"
            f" {size / blocks / 1e9:.2f} GB/s ({ours / blocks:.2f}x)"
        )


def into_llama(tokens: int, codec: str, flash: bool, rounds: int) -> None:
    model = str(bundled_model())
    with tempfile.TemporaryDirectory() as folder:
        llm = llama_cpp.Llama(model, n_ctx=tokens + 64, verbose=False, flash_attn=flash)
        engine = LlamaCpp(llm)
        ids = np.random.default_rng(0).integers(1000, 20000, tokens).astype(np.uint32)
        engine.evaluate(ids)
        store = kvsnap.Store(Path(folder) / "store")
        session = kvsnap.Session(store, engine, "bench", codec=codec)
        session.save()
        state = (Path(folder) / "state").as_posix().encode()
        array = (llama_cpp.llama_token * tokens)(*ids.tolist())
        llama_cpp.llama_state_seq_save_file(llm.ctx, state, 0, array, tokens)
        count = ctypes.c_size_t()

        def ours() -> None:
            llm.reset()
            report = kvsnap.Session(store, engine, "bench", codec=codec).resume(ids)
            assert report.reused_tokens == tokens - 1

        def theirs() -> None:
            llm.reset()
            read = llama_cpp.llama_state_seq_load_file(
                llm.ctx, state, 0, array, tokens, ctypes.byref(count)
            )
            assert read

        mine, other = best_of(rounds, ours, theirs)
        print(
            f"into llama.cpp, {tokens} tokens, {codec}, flash attention {'on' if flash else 'off'}:"
            f" kvsnap {mine * 1e3:.1f} ms, llama_state_seq_load_file {other * 1e3:.1f} ms"
            f" ({mine / other:.2f}x)"
        )
        llm.close()


def both_memories(rounds: int) -> None:
    """glibc keeps freed memory below a threshold that it moves up to 32 MB by itself."""
    for title, settings in (
        ("fresh memory", {"MALLOC_MMAP_THRESHOLD_": "131072"}),
        ("kept memory", {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TOP_PAD_": "1073741824"}),
    ):
        print(title, flush=True)
        command = [sys.executable, __file__, "--rounds", str(rounds), "--blocks-only"]
        subprocess.run(command, check=True, env={**os.environ, **settings})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = options.rounds
    if options.blocks_only:
        blocks_against_safetensors("SmolLM2-135M", 1536, 64, rounds)
        blocks_against_safetensors("8B", 2048, 64, rounds)
        sys.exit()
    both_memories(rounds)
    for codec in ("raw", "zstd"):
        for flash in (False, True):
            into_llama(1500, codec, flash, rounds)
