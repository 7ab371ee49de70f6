"""Work on many files at once, its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

LINGER = 3.0
"""Ctrl-C must not take as long as a server that hangs has time for its answer."""
AT_ONCE = 16
"""Files under way at one time. A remote's answer takes 1 to 100 ms, nearly all of it waiting."""
MOST_IN_MEMORY = 2**28
_T = TypeVar("_T")
_R = TypeVar("_R")


def at_once_of(size: int) -> int:
    """How many files of `size` bytes of rows may be in memory at one time, as they come and decoded."""
    return max(1, min(AT_ONCE, MOST_IN_MEMORY // max(1, 2 * size)))


def in_order(
    work: Callable[[_T], _R],
    items: Iterable[_T],
    at_once: int = AT_ONCE,
    linger: float | None = LINGER,
) -> Generator[tuple[_T, _R]]:
    """(item, result) in the items' order, while the next ones are under way.

    No item is begun before all but the last `at_once` are done: what is cut off leaves holes in the
    last `at_once` only, and memory holds no more results than that. The first error is raised, and
    nothing is begun after it; what is under way then is waited for `linger` seconds (None: until it
    ends), before the caller closes a remote or store below it.
    """
    under_way: deque[tuple[_T, Future[_R]]] = deque()
    pool = ThreadPoolExecutor(at_once)
    try:
        for item in items:
            if len(under_way) >= at_once:
                done, future = under_way.popleft()
                yield done, future.result()
            under_way.append((item, pool.submit(work, item)))
        while under_way:
            done, future = under_way.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for _, future in under_way if not future.cancelled()], linger)
