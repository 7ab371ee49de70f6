"""Chats that share a system prompt, through the caches that llama-cpp-python can be given.

    python tests/bench/llama_cache.py [--chats 20] [--turns 6] [--caches none,ram,disk,kvsnap]

The chats take turns: all of them ask their first question, then all ask their second. Each cache
runs in a process of its own, one after the other, with a limit of `--capacity`; then a new process
asks each chat's next question ("after a restart"). Tokens are those that the engine decoded. A look-
up is what the cache takes before a completion (`cache[prompt]`, and `load_state` where it is called),
keeping what it takes after one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import kvsnap
from kvsnap.cli.bundled import bundled_model

SYSTEM = Path(__file__).parents[2] / "samples" / "system-prompt.md"
THINGS = ["brake", "saddle", "lamp", "chain", "pump", "basket", "tyre", "bell", "lock", "helmet"]
NAMES = {
    "none": "no cache",
    "ram": "LlamaRAMCache",
    "disk": "LlamaDiskCache",
    "kvsnap": "kvsnap.LlamaCache",
}


def question(chat: int, turn: int) -> str:
    picked = np.random.default_rng([chat, turn]).choice(THINGS, 6)
    return f"This is customer {chat}. I have a question about the {', the '.join(picked)}."


def make_cache(kind: str, llm: llama_cpp.Llama, folder: Path, capacity: int) -> Any:
    if kind == "ram":
        return llama_cpp.LlamaRAMCache(capacity_bytes=capacity)
    if kind == "disk":
        return llama_cpp.LlamaDiskCache(str(folder), capacity_bytes=capacity)
    return kvsnap.LlamaCache(kvsnap.Store(folder, capacity=capacity), llm)


class Run:
    """One process: one Llama, one cache, and what it costs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.llm = llama_cpp.Llama(
            str(bundled_model()),
            n_ctx=job["ctx"],
            n_threads=job["threads"],
            n_threads_batch=job["threads"],
            verbose=False,
        )
        self.decoded, self.looking, self.keeping = 0, list[float](), list[float]()
        decode = self.llm._ctx.decode

        def counting(batch: Any) -> None:
            decode(batch)
            self.decoded += batch.batch.n_tokens

        self.llm._ctx.decode = counting
        if job["kind"] != "none":
            cache = make_cache(job["kind"], self.llm, Path(job["folder"]), job["capacity"])
            self.llm.set_cache(cache)
            self._time(cache)

    def _time(self, cache: Any) -> None:
        """Methods of the classes, because a subscript looks there; of this process only."""
        kind, llama = type(cache), llama_cpp.Llama
        kind.__getitem__ = timed(kind.__getitem__, self.looking)
        kind.__setitem__ = timed(kind.__setitem__, self.keeping)
        llama.load_state = timed(llama.load_state, self.looking)
        llama.save_state = timed(llama.save_state, self.keeping)

    def ask(self, messages: list[dict[str, Any]]) -> None:
        found = self.llm.create_chat_completion(
            messages, max_tokens=self.job["answer"], temperature=0.0
        )
        messages.append(found["choices"][0]["message"])

    def turns(self, chats: list[list[dict[str, Any]]], turns: range) -> dict[str, Any]:
        started = time.perf_counter()
        with open(os.devnull, "w") as null, contextlib.redirect_stderr(null):  # LlamaDiskCache's
            for turn in turns:
                for number, messages in enumerate(chats):
                    messages.append({"role": "user", "content": question(number, turn)})
                    self.ask(messages)
        requests = len(turns) * len(chats)
        return {
            "seconds": time.perf_counter() - started,
            "decoded": self.decoded,
            "looking": sum(self.looking) / requests,
            "keeping": sum(self.keeping) / requests,
            "chats": chats,
        }


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        started = time.perf_counter()
        try:
            return method(*args)
        finally:
            seconds.append(time.perf_counter() - started)

    return run


def one_process(job: dict[str, Any]) -> None:
    chats = job["chats"]
    print(json.dumps(Run(job).turns(chats, range(job["first"], job["first"] + job["turns"]))))


def in_a_process(job: dict[str, Any]) -> Any:
    command = [sys.executable, __file__, "--job", "-"]
    done = subprocess.run(command, check=True, input=json.dumps(job).encode(), stdout=-1)
    return json.loads(done.stdout)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def lines(options: argparse.Namespace) -> Iterator[str]:
    system = SYSTEM.read_text()[: options.system]
    yield (
        f"| {options.chats} chats x {options.turns} turns | tokens computed | seconds |"
        " look-up | keeping | on disk | after a restart: tokens computed | seconds | look-up |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for kind in options.caches.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            job = {
                "kind": kind,
                "folder": name,
                "capacity": options.capacity,
                "ctx": options.ctx,
                "threads": options.threads,
                "answer": options.answer,
            }
            chats = [[{"role": "system", "content": system}] for _ in range(options.chats)]
            first = in_a_process({**job, "chats": chats, "first": 0, "turns": options.turns})
            size = bytes_in(folder) if kind in ("disk", "kvsnap") else 0
            again = {**job, "chats": first["chats"], "first": options.turns, "turns": 1}
            then = in_a_process(again)
        yield (
            f"| {NAMES[kind]} | {first['decoded']:,} | {first['seconds']:.1f}"
            f" | {first['looking'] * 1e3:.1f} ms | {first['keeping'] * 1e3:.1f} ms"
            f" | {size / 1e6:,.1f} MB | {then['decoded']:,} | {then['seconds']:.1f}"
            f" | {then['looking'] * 1e3:.1f} ms |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--answer", type=int, default=8, help="tokens of an answer")
    parser.add_argument("--system", type=int, default=2400, help="characters of the system prompt")
    parser.add_argument("--caches", default="none,ram,disk,kvsnap")
    parser.add_argument("--capacity", type=int, default=2 << 30, help="the library's default")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", help="where the caches write; default: the temporary folder")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        one_process(json.load(sys.stdin))
    else:
        for line in lines(given):
            print(line, flush=True)
