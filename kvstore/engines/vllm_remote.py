"""What a remote has of a prompt is brought into the store before the prompt is admitted: the scheduler
asks again meanwhile, and never waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from kvsnap.engines.vllm_plan import Move, Rank
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.identity import Root
from kvsnap.kvstore.sharing.through import Through
from kvsnap.kvstore.store import Store

MOST_SECONDS = 10.0
"""A prompt waits no longer: then it is computed from what has come. A remote that answers, and slowly,
runs into no timeout, and how long computing takes nobody has measured here."""
_log = logging.getLogger("kvsnap")


class Ahead:
    """One store's remote, asked for a few prompts at a time."""

    def __init__(self, store: Store, through: Through, threads: int = 4) -> None:
        self.store, self.through = store, through
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvsnap-ahead")
        self._asked: dict[str, tuple[Future[None], float]] = {}
        """Of each request that waits or waited, with the time at which it asked first."""

    def is_here(
        self, request_id: str, roots: Mapping[Rank, Root], prompt: Callable[[], Move]
    ) -> bool:
        """Whether all that the remote has of a request's prompt is in the store, or will not come. The
        first call begins to bring it."""
        asked = self._asked.get(request_id)
        if asked is None:
            bringing = self._pool.submit(self._bring, prompt(), roots)
            asked = self._asked[request_id] = bringing, time.monotonic()
        return asked[0].done() or time.monotonic() - asked[1] > MOST_SECONDS

    def rest(self, seconds: float) -> None:
        """Let those who bring something have the interpreter, where nobody computes: vLLM would ask
        without a pause."""
        if coming := [bringing for bringing, _ in self._asked.values() if not bringing.done()]:
            wait(coming, seconds, FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _bring(self, prompt: Move, roots: Mapping[Rank, Root]) -> None:
        try:
            for rank, root in roots.items():
                wanted = prompt.wanted(rank)
                names = [block.name for block in wanted]
                here = self.store.index.depth(names)
                there = self.through.reach(names, here, len(names))
                if there == here:
                    continue
                with self.through.fetch(
                    root, wanted[here:there], lambda start, stop: None
                ) as coming:
                    for block in wanted[here:there]:
                        if coming.wait(block.name) is not None:
                            break
            problem = self.through.take_problem()
        except KvsnapError as error:
            problem = error.what
        if problem:
            _log.warning("kvsnap: not all of a prompt came from the remote: %s", problem)
