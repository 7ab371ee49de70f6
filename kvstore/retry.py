"""Work on moving ground: a damaged index is built anew by the next try, a block that went away is put
again. Both come of other processes, and seldom twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from kvsnap.formats.errors import IndexDamaged, Vanished

TRIES = 5
_Done = TypeVar("_Done")


def try_again(work: Callable[[], _Done]) -> _Done:
    """What `work` returns, at the latest by the last try, whose error is the caller's."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(IndexDamaged, Vanished):
            return work()
    return work()
