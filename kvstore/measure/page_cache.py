"""Files out of the system's page cache, so that the next read comes from the device.

The system takes the request as advice; whether it was followed is looked at, never assumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def drop(paths: Iterable[Path]) -> str:
    """Drop the cached contents of synced files; why that cannot be done here, or "".

    Names and inodes stay cached, and so does what a virtual machine's host or the drive keeps.
    """
    if not hasattr(os, "posix_fadvise"):
        return "this system has no call that drops files from its cache"
    for path in paths:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)  # what is not on the device yet would be kept
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            if _cached(handle):
                return "the file system keeps its files in memory, or does not say whether it does"
        finally:
            os.close(handle)
    return ""


def _cached(handle: int) -> bool:
    """Whether the file's first byte can be had without the device; True where nobody knows."""
    if not hasattr(os, "preadv") or not hasattr(os, "RWF_NOWAIT"):
        return True
    try:
        os.preadv(handle, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # no such question to this file system: tmpfs, and some network ones
        return True
    return True
