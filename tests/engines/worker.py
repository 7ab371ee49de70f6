"""Runs in a process of its own: one llama.cpp engine that saves, resumes, or is the reference.

    python worker.py save|resume|reference JOB.json    prints one JSON value

A job: model, store, settings of the Llama, saved prompts {name: ids}, and cases
[{saved, prompt, reused}]. The reference is never interrupted: it evaluates what the saver
evaluated, forgets what is not to be reused, and evaluates the rest in the resumer's batches.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from blake3 import blake3

import kvsnap
from kvsnap.engines import LlamaCpp


class Counted:
    """A Llama whose really decoded tokens are counted at the library's own door."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.llm = llama_cpp.Llama(job["model"], verbose=False, n_threads=1, **job["settings"])
        self.engine = LlamaCpp(self.llm)
        self.decoded = 0
        decode = self.llm._ctx.decode

        def counting(batch: Any) -> None:
            self.decoded += batch.batch.n_tokens
            decode(batch)

        self.llm._ctx.decode = counting

    def forget(self) -> None:
        self.llm.reset()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.llm.ctx), True)

    def logits(self) -> str:
        """Digest of the last token's logits: equal means equal bit for bit."""
        pointer = llama_cpp.llama_get_logits_ith(self.llm.ctx, -1)
        values = np.ctypeslib.as_array(pointer, shape=(self.llm.n_vocab(),))
        return blake3(values.tobytes()).hexdigest()

    def finish(self, prompt: list[int], greedy: int) -> dict[str, Any]:
        """Evaluate what is missing of the prompt, then take logits and greedy tokens."""
        held = len(self.engine.token_ids())
        before = self.decoded
        self.engine.evaluate(np.array(prompt[held:], np.uint32))
        computed, logits = self.decoded - before, self.logits()
        tokens = self.llm.generate(prompt, temp=0.0)
        new = [int(token) for _, token in zip(range(greedy), tokens, strict=False)]
        return {"computed": computed, "logits": logits, "tokens": new}


def save(job: dict[str, Any]) -> Any:
    counted = Counted(job)
    store = kvsnap.Store(job["store"])
    reports = {}
    for name, ids in job["saved"].items():
        counted.forget()
        session = kvsnap.Session(store, counted.engine, name)
        # Sessions share prefixes; each must come from its own uninterrupted evaluation here, or
        # the reference could not know the batches.
        counted.engine.evaluate(np.array(ids, np.uint32))
        reports[name] = vars(session.save())
    return reports


def resume(job: dict[str, Any]) -> Any:
    counted = Counted(job)
    store = kvsnap.Store(job["store"])
    results = []
    for case in job["cases"]:
        counted.forget()
        session = kvsnap.Session(store, counted.engine, case["saved"])
        report = session.resume(case["prompt"])
        found = counted.finish(case["prompt"], job["greedy"])
        results.append({**found, "reused": report.reused_tokens, "why": report.stopped_by})
    return results


def reference(job: dict[str, Any]) -> Any:
    counted = Counted(job)
    results = []
    for case in job["cases"]:
        counted.forget()
        counted.engine.evaluate(np.array(job["saved"][case["saved"]], np.uint32))
        counted.engine.truncate(case["reused"])
        results.append(counted.finish(case["prompt"], job["greedy"]))
    return results


if __name__ == "__main__":
    what, path = sys.argv[1:]
    task = json.loads(Path(path).read_text())
    print(json.dumps({"save": save, "resume": resume, "reference": reference}[what](task)))
