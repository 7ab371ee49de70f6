"""Runs in a process of its own: one transformers model that saves, resumes, or is the reference.

    python transformers_worker.py save|resume|reference JOB.json    prints one JSON value

A job: folder of the model, types, store, saved prompts {name: ids}, and cases
[{saved, prompt, reused}]. The saver evaluates by the engine; the resumer uses what an application
does, `load` and `generate()`. The reference is never interrupted: it evaluates what the saver
evaluated, forgets what is not to be reused, and evaluates the rest in the resumer's batches.
"""

from __future__ import annotations

import json
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import kvsnap
from kvsnap.engines.transformers import Transformers, load
from kvsnap.formats.names import token_array

CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def model_of(job: dict[str, Any], dtype: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, dtype))
    return model.eval()


def store_of(job: dict[str, Any], model: Any) -> kvsnap.Store:
    """One for each type: a session of one name is one conversation."""
    return kvsnap.Store(Path(job["store"]) / str(model.dtype))


def digest(logits: torch.Tensor) -> str:
    """Equal means equal bit for bit."""
    return blake3(logits.float().contiguous().numpy().tobytes()).hexdigest()


def save(job: dict[str, Any], model: Any) -> Any:
    store, reports = store_of(job, model), {}
    for name, ids in job["saved"].items():
        engine = Transformers(model)
        session = kvsnap.Session(store, engine, name)
        engine.evaluate(token_array(ids))
        reports[name] = vars(session.save())
    return reports


def resume(job: dict[str, Any], model: Any) -> Any:
    store, results = store_of(job, model), []
    counted = 0

    def count(module: Any, args: Any, out: Any) -> None:
        nonlocal counted
        counted += out.shape[1]

    for case in job["cases"]:
        cache, reused = load(store, model, case["prompt"], name=case["saved"])
        counted, new = 0, job["greedy"]
        hook = model.get_input_embeddings().register_forward_hook(count)
        out = model.generate(
            torch.tensor([case["prompt"]]),
            **{CACHE: cache},
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        hook.remove()
        results.append(
            {
                "reused": reused,
                "computed": counted - (new - 1),
                "logits": digest(out.logits[0][0]),
                "tokens": out.sequences[0, len(case["prompt"]) :].tolist(),
            }
        )
    return results


def reference(job: dict[str, Any], model: Any) -> Any:
    results = []
    for case in job["cases"]:
        engine = Transformers(model)
        engine.evaluate(token_array(job["saved"][case["saved"]]))
        engine.truncate(case["reused"])
        new = engine.generate(token_array(case["prompt"]), temperature=0.0, seed=0)
        tokens = [next(new)]
        logits = digest(engine._logits[-1])
        tokens += [next(new) for _ in range(job["greedy"] - 1)]
        results.append({"logits": logits, "tokens": tokens})
    return results


if __name__ == "__main__":
    what, path = sys.argv[1:]
    task = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    run = {"save": save, "resume": resume, "reference": reference}[what]
    print(json.dumps({dtype: run(task, model_of(task, dtype)) for dtype in task["dtypes"]}))
