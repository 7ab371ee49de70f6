"""Run a real vLLM engine with the connector in this process, as a job says, and print what it did.

    python serve.py JOB.json > RESULT.json

JOB: {"model": PATH, "store": PATH, "extra": {...}, "args": {...of LLM}, "steps": [STEP, ...]}, or a list
of them: one engine after the other. In place of what it did stands why it did not start, where it did not.
Also "connector": {...of KVTransferConfig}, "may_refuse": whether it may not start, "time_hooks": whether the
time in the connector's methods is measured.
STEP: {"prompts": [[token id, ...], ...], "max_tokens": N, "salt": TEXT, "abort_after": N, "lora": PATH,
"damage": [HOW, number of the block], "stored": wait for so many block files, "flush": whether vLLM's own
cache is emptied afterwards (it is)}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

sys.path.append(str(Path(__file__).parents[2]))

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest

from tests.vllm.files import block_files, damage, wait_for_blocks

CONNECTOR = {
    "kv_connector": "KVSnapConnector",
    "kv_connector_module_path": "kvsnap.engines.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "disable_log_stats": False,
    "seed": 0,
}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    found = [serve(one) for one in job] if isinstance(job, list) else serve(job)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    args = DEFAULTS | job.get("args", {})
    if job.get("store") is not None or "connector" in job:
        extra = job.get("extra", {})
        if job.get("store") is not None:
            extra = {"store": job["store"]} | extra
        connector = CONNECTOR | {"kv_connector_extra_config": extra} | job.get("connector", {})
        args["kv_transfer_config"] = KVTransferConfig(**connector)
    if job.get("time_hooks") and job.get("store") is not None:
        time_hooks()
    try:
        llm = LLM(model=job["model"], **args)
    except Exception as error:
        if not job.get("may_refuse"):
            raise
        return {"refused": f"{type(error).__name__}: {error}"}
    steps = [run(llm, step, job) for step in job["steps"]]
    llm.llm_engine.engine_core.shutdown()
    return {"steps": steps, "modules": sorted({"numba", "llvmlite"} & set(sys.modules))}


def run(llm: LLM, step: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    if "damage" in step:
        how, number = step["damage"]
        damage(block_files(Path(job["store"]))[number], how)
    before, spent[0], began = counters(llm), 0.0, time.perf_counter()
    params = SamplingParams(
        temperature=0.0, max_tokens=step.get("max_tokens", 8), logprobs=1, ignore_eos=True
    )
    prompts = [
        TokensPrompt(
            prompt_token_ids=ids, **({"cache_salt": step["salt"]} if "salt" in step else {})
        )
        for ids in step["prompts"]
    ]
    if "abort_after" in step:
        outputs = abort(llm, prompts, params, step["abort_after"])
    else:
        lora = LoRARequest("adapter", 1, step["lora"]) if "lora" in step else None
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
    seconds, hooks = time.perf_counter() - began, spent[0]
    if step.get("flush", True):
        llm.reset_prefix_cache()  # what comes next is not found in vLLM's own cache
    if "stored" in step:
        wait_for_blocks(Path(job["store"]), step["stored"])
    after = counters(llm)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [
                entry[token].logprob
                for entry, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)
            ]
            for o in outputs
        ],
        "cached": [output.num_cached_tokens for output in outputs],
        "counted": {name: value - before.get(name, 0) for name, value in after.items()},
        "seconds": seconds,
        "hooks": hooks,
    }


def abort(llm: LLM, prompts: list[Any], params: Any, steps: int) -> list[Any]:
    """Take the first request back after some steps; the others go on."""
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    finished = {}
    while engine.has_unfinished_requests():
        if steps == 0:
            engine.abort_request(["0"])
        steps -= 1
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return [finished[key] for key in sorted(finished) if key != "0"]


HOOKS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "update_connector_output",
    "request_finished",
)
spent = [0.0]
"""Seconds in the connector's methods, where they are timed."""


def time_hooks() -> None:
    from kvsnap.engines.vllm import KVSnapConnector

    def timed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - began

        return call

    for name in HOOKS:
        setattr(KVSnapConnector, name, timed(getattr(KVSnapConnector, name)))


def counters(llm: LLM) -> dict[str, float]:
    return {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}


if __name__ == "__main__":
    main()
