"""Work on many files at once, its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AT_ONCE = 16
"""Files under way at one time. A remote's answer takes 1 to 100 ms, nearly all of it waiting."""
_T = TypeVar("_T")
_R = TypeVar("_R")


def in_order(
    work: Callable[[_T], _R], items: Iterable[_T], at_once: int = AT_ONCE
) -> Generator[tuple[_T, _R]]:
    """(item, result) in the items' order, while the next ones are under way.

    No item is begun before all but the last `at_once` are done: what is cut off leaves holes in the
    last `at_once` only, and memory holds no more results than that. The first error is raised, and
    nothing is begun after it.
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
        # Not waited for: each may hang for as long as its remote's time limit says.
        pool.shutdown(wait=False, cancel_futures=True)
