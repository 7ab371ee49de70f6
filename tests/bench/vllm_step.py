"""What a step costs vLLM's scheduler with kvsnap's planner, where many requests decode at once.

    .venv-vllm/bin/python tests/bench/vllm_step.py [--requests 512] [--steps 200]

No engine runs: the planner is told of steps as the connector tells it. Of most steps no request fills a
block; in some all do, as the requests here are equally long.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

from kvsnap.engines.vllm_plan import Done
from kvsnap.engines.vllm_planner import Planner
from kvsnap.formats.identity import Identity
from kvsnap.formats.layout import Group, Layout, Plane
from kvsnap.kvstore.store import Store

SIZE, PAGE, PROMPT = 64, 16, 1000
PLANE = Plane(name="kv", kind="pages", dtype="U8", row=(64,), source_type="bfloat16")
IDENTITY = Identity(
    family="vllm",
    weights="blake3:" + "5a" * 32,
    architecture="llama",
    layout=Layout(groups=(Group(name="g0", layers=1, planes=(PLANE,)),)),
    rope=None,
    block_size=SIZE,
)


def request(number: int, steps: int) -> Any:
    return SimpleNamespace(
        request_id=str(number),
        all_token_ids=[(number * 7 + token) % 1000 for token in range(PROMPT + steps)],
        num_tokens=PROMPT,
        num_computed_tokens=0,
        cache_salt=None,
        mm_features=[],
        prompt_embeds=None,
        resumable=False,
        pooling_params=None,
        lora_request=None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    told = parser.parse_args()
    identities: Any = SimpleNamespace(plain=lambda: {(0, 0): IDENTITY.canonical()})
    with tempfile.TemporaryDirectory() as folder, Store(folder) as store:
        planner = Planner(store, identities, None, SIZE, PAGE)
        requests = [request(number, told.steps) for number in range(told.requests)]
        began = time.perf_counter()
        for one in requests:
            planner.matched(one, 0)
            planner.admit(one, [], 0)
        admitted = (time.perf_counter() - began) / told.requests
        scheduled = {one.request_id: 1 for one in requests}
        pages = list(range((PROMPT + told.steps) // PAGE + 1))
        seconds = []
        for _ in range(told.steps):
            for one in requests:
                one.num_computed_tokens = one.num_tokens - 1
            began = time.perf_counter()
            plan = planner.plan(scheduled, lambda request_id: pages)
            planner.settle(Done(plan.step))
            seconds.append(time.perf_counter() - began)
            for one in requests:
                one.num_tokens += 1
        planner.close()
    print(f"a new request of {PROMPT} tokens: {admitted * 1e6:.0f} us")
    median, mean = statistics.median(seconds) * 1e6, statistics.mean(seconds) * 1e6
    print(f"a step of {told.requests} requests: median {median:.0f} us, mean {mean:.0f} us,")
    print(f"one that fills a block of each: {max(seconds) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
