"""Work on moving ground: a damaged index is built anew by the next try, a block that went away is put
again. Both come of other processes, and seldom twice."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from typing import TypeVar

from kvsnap.formats.errors import IndexDamaged, Vanished

TRIES = 8
PAUSE = 0.002
"""Seconds before the second try, at most; twice as long before each one after it. Five tries without a
pause were all used up, once in some hundred runs, where eight processes removed what eight saved."""
_Done = TypeVar("_Done")


def try_again(work: Callable[[], _Done]) -> _Done:
    """What `work` returns, at the latest by the last try, whose error is the caller's."""
    for number in range(TRIES - 1):
        with contextlib.suppress(IndexDamaged, Vanished):
            return work()
        time.sleep(random.uniform(0, PAUSE * 2**number))
    return work()
