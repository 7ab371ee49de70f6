"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever it happens to be; inside a callback that C code made (the
engine's log, say) it is printed and dropped, and the work goes on. So the first SIGINT is remembered
as well, and asked for between batches, between tokens and after loading.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_seen = threading.Event()


def _remember(number: int, frame: FrameType | None) -> None:
    _seen.set()
    raise KeyboardInterrupt


def watch() -> None:
    """Take SIGINT over, in the main thread of the command line."""
    _seen.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _remember)


def check() -> None:
    """Raise KeyboardInterrupt if one was asked for and got lost."""
    if _seen.is_set():
        raise KeyboardInterrupt
