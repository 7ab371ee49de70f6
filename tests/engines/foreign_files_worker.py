"""Runs in a process of its own, because llama.cpp aborts it on a bad file:

    python foreign_files_worker.py JOB.json    prints one JSON value

A job: model, settings of the Llama, prompt, how many greedy tokens, files to save the evaluated prompt to
and files to load, {path: "sequence" or "session"}. The value: what is generated uninterrupted, and after
each load; with the ids that the file gave and how many tokens were decoded.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def save(llm: llama_cpp.Llama, path: str, kind: str) -> None:
    ids = (ctypes.c_int * llm.n_tokens)(*map(int, llm.input_ids[: llm.n_tokens]))
    if kind == "sequence":
        done = llama_cpp.llama_state_seq_save_file(llm.ctx, path.encode(), 0, ids, len(ids))
    else:
        done = llama_cpp.llama_state_save_file(llm.ctx, path.encode(), ids, len(ids))
    assert done


def load(llm: llama_cpp.Llama, path: str, kind: str) -> list[int]:
    ids, count = (ctypes.c_int * llm.n_ctx())(), ctypes.c_size_t()
    if kind == "sequence":
        arguments = (path.encode(), 0, ids, len(ids), ctypes.pointer(count))
        done = llama_cpp.llama_state_seq_load_file(llm.ctx, *arguments)
    else:
        done = llama_cpp.llama_state_load_file(
            llm.ctx, path.encode(), ids, len(ids), ctypes.pointer(count)
        )
    assert done, f"{path} was not loaded"
    found = list(ids[: count.value])
    llm.n_tokens = len(found)
    llm.input_ids[: len(found)] = np.array(found)
    return found


def run(job: dict[str, Any]) -> dict[str, Any]:
    llm = llama_cpp.Llama(job["model"], verbose=False, n_threads=1, n_ctx=256, **job["settings"])
    decoded, decode = [0], llm._ctx.decode

    def counting(batch: Any) -> None:
        decoded[0] += batch.batch.n_tokens
        decode(batch)

    llm._ctx.decode = counting  # type: ignore[method-assign]

    def greedy() -> list[int]:
        tokens = llm.generate(job["prompt"], temp=0.0)
        return [int(token) for _, token in zip(range(job["greedy"]), tokens, strict=False)]

    llm.eval(job["prompt"])
    for path, kind in job["save"].items():
        save(llm, path, kind)
    llm.reset()
    found: dict[str, Any] = {"native": greedy(), "loaded": {}}
    for path, kind in job["load"].items():
        llm.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
        ids, before = load(llm, path, kind), decoded[0]
        found["loaded"][path] = {"ids": ids, "tokens": greedy(), "decoded": decoded[0] - before}
    return found


if __name__ == "__main__":
    print(json.dumps(run(json.loads(Path(sys.argv[1]).read_text()))))
