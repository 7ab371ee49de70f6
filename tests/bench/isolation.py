"""Whether a tenant can tell by the clock that another one has the same prompt.

    python tests/bench/isolation.py [--probes 200] [--requests 40] [--seed 1]

One encrypted store, one S3 server (SeaweedFS) on loopback. Alice has stored and pushed some prompts. Bob
asks, in random order, for each of these and for as many that nobody has; what he does first is to look,
then he stores and pushes the same. Calls of the remote are counted. `owner`: Alice asks for her own, to
show what a difference looks like. A real engine: one Llama serves both through a `LlamaCache`, and Bob's
prompt is or is not the one that Alice asked just before.

p: two-sided rank test (Mann-Whitney, normal approximation with ties). P(slower): how often one that Alice
has takes longer than one that nobody has, 0.5 where chance alone decides.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap import LlamaCache, Store
from kvsnap.cli.bundled import bundled_model
from kvsnap.formats.errors import NotFound
from kvsnap.formats.names import TokenIds
from kvsnap.kvstore.explain.explain import explain
from kvsnap.kvstore.remotes import open_remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.remotes.servers import seaweed
from tests.tenants import ALICE, BOB, open_shared

BLOCKS, BLOCK = 4, 16
THEIRS, NOBODYS = "somebody else's", "nobody's"
Times = dict[str, dict[str, list[float]]]
"""Step → whose the prompt is → seconds of each probe."""


def slower(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """(P(a value of `one` is larger than one of `other`), p that this is chance)."""
    both = np.concatenate([one, other])
    _, inverse, counts = np.unique(both, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[inverse]
    n, m = len(one), len(other)
    larger = float(ranks[:n].sum()) - n * (n + 1) / 2
    ties = float((counts**3 - counts).sum()) / ((n + m) * (n + m - 1))
    spread = math.sqrt(n * m / 12 * (n + m + 1 - ties))
    score = (larger - n * m / 2) / spread if spread else 0.0
    return larger / (n * m), math.erfc(abs(score) / math.sqrt(2))


def prompt(number: int) -> TokenIds:
    return some_ids(BLOCKS * BLOCK + 3, number)


class Bench:
    """Alice's prompts are even, those that nobody has odd."""

    def __init__(self, folder: Path, url: str, probes: int, seed: int) -> None:
        self.folder, self.url = folder, url
        self.order = list(range(2 * probes))
        self.chance = random.Random(seed)
        self.chance.shuffle(self.order)
        self.times: Times = {}
        self.calls: dict[str, dict[str, set[str]]] = {}

    def alice_stores(self) -> None:
        with open_shared(self.folder / "s", BLOCK) as store, open_remote(self.url) as remote:
            for number in self.order:
                if number % 2 == 0:
                    turn(store, StampedEngine(), prompt(number), f"chat {number}", tenant=ALICE)
                    push(store, remote, ALICE.tenant_id, f"chat {number}")

    def bob_asks(self) -> None:
        """Each step over all prompts, so that what one leaves behind is there for all of the next."""
        with (
            open_remote(self.url) as opened,
            open_shared(self.folder / "s", BLOCK) as store,
            open_shared(self.folder / "t", BLOCK, remote=self.url) as through,
        ):
            remote = Counted(opened)
            store.keys.add(BOB)

            def ask(store: Store, number: int, name: str | None = None) -> None:
                turn(store, StampedEngine(), prompt(number), name, tenant=BOB, save=False)

            def explained(number: int) -> None:
                explain(Session(store, StampedEngine(), tenant=BOB), prompt(number))

            def pulled(number: int) -> None:
                with suppress(NotFound):
                    pull(store, remote, f"chat {number}", tenant=BOB)

            def saved(number: int) -> None:
                turn(store, StampedEngine(), prompt(number), f"chat {number}", tenant=BOB)

            def pushed(number: int) -> None:
                push(store, remote, BOB.tenant_id, f"chat {number}")

            self.step("look up", lambda number: ask(store, number), remote)
            self.step("look up a session", lambda n: ask(store, n, f"chat {n}"), remote)
            self.step("explain", explained, remote)
            self.step("read through", lambda number: ask(through, number), remote)
            self.step("pull", pulled, remote)
            self.step("save", saved, remote)
            self.step("push", pushed, remote)

    def alice_asks(self) -> None:
        """Her own prompts, and those that nobody stored under her key."""
        with open_shared(self.folder / "s", BLOCK) as store:
            self.step(
                "owner: look up",
                lambda n: turn(store, StampedEngine(), prompt(n), tenant=ALICE, save=False),
            )

    def step(self, name: str, does: Callable[[int], object], remote: Counted | None = None) -> None:
        for number in self.order:
            whose = NOBODYS if number % 2 else THEIRS
            before = _calls(remote)
            started = time.perf_counter()
            does(number)
            took = time.perf_counter() - started
            self.times.setdefault(name, {}).setdefault(whose, []).append(took)
            made = {
                k: v - before.get(k, 0) for k, v in _calls(remote).items() if v > before.get(k, 0)
            }
            told = ", ".join(f"{count} {call}" for call, count in sorted(made.items()))
            self.calls.setdefault(name, {}).setdefault(whose, set()).add(told)

    def engine(self, requests: int) -> None:
        """Seconds until Bob's first token, right after Alice's request."""
        import llama_cpp

        threads = {"n_threads": 1, "n_threads_batch": 1}
        llm = llama_cpp.Llama(str(bundled_model()), n_ctx=256, verbose=False, **threads)
        now = [ALICE]
        with open_shared(self.folder / "u", BLOCK) as store:
            llm.set_cache(LlamaCache(store, llm, tenant=lambda: now[0]))

            def first(tenant: Any, seed: int) -> float:
                now[0] = tenant
                ids = np.random.default_rng(seed).integers(1000, 20000, 60).tolist()
                started = time.perf_counter()
                llm.create_completion(ids, max_tokens=1, temperature=0.0)
                return time.perf_counter() - started

            for name, second in (("first token", BOB), ("owner: first token", ALICE)):
                found = self.times.setdefault(name, {THEIRS: [], NOBODYS: []})
                for number in self.chance.sample(range(2 * requests), 2 * requests):
                    seed = number + (10_000 if second is ALICE else 0)
                    first(ALICE, seed)
                    asked = seed if number % 2 == 0 else seed + 100_000
                    found[NOBODYS if number % 2 else THEIRS].append(first(second, asked))
        llm.close()

    def report(self) -> None:
        print("milliseconds: median (10 % .. 90 %)")
        columns = f"{THEIRS:>26}{NOBODYS:>26}{'P(slower)':>11}{'p':>8}"
        print(f"{'':20}{columns}  calls of the remote")
        for name, found in self.times.items():
            cells = "".join(f"{_spread(found[whose]):>26}" for whose in (THEIRS, NOBODYS))
            share, chance = slower(found[THEIRS], found[NOBODYS])
            calls = self.calls.get(name, {})
            same = calls.get(THEIRS) == calls.get(NOBODYS)
            told = "; ".join(sorted(calls.get(THEIRS, {""}))) if same else f"DIFFER: {calls}"
            print(f"{name:20}{cells}{share:>11.2f}{chance:>8.2g}  {told}")


def _calls(remote: Counted | None) -> dict[str, int]:
    return {name: count.calls for name, count in remote.counts().items()} if remote else {}


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = (1000 * float(q) for q in np.quantile(seconds, [0.1, 0.5, 0.9]))
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder)) as server:
        os.environ.update(server.environment())
        yield f"s3://{server.bucket}/isolation"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--probes", type=int, default=200, help="prompts of either kind")
    parser.add_argument("--requests", type=int, default=40, help="of either kind to the Llama")
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    options = parser.parse_args()
    with _server() as url, tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), url, options.probes, options.seed)
        bench.alice_stores()
        bench.bob_asks()
        bench.alice_asks()
        if options.requests:
            bench.engine(options.requests)
    bench.report()


if __name__ == "__main__":
    main()
