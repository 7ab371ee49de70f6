"""Whether the model's files are still those that this process loaded its weights from.

A store may be attached to a server that has run for days, and its folder may have had a new version of the
model since. The digest would be that of the new one, the KV that of the old.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvsnap.engines.served_weights import weight_files
from kvsnap.formats.errors import NotFound, Unsupported

Stamps = dict[str, tuple[int, int, int, int]]
"""Path → inode, size, times of change in ns."""
_loaded: Stamps = {}
"""Of the files when this process attached first."""


def check_still_loaded(model: Path, *, starting: bool) -> None:
    """Raise `Unsupported` where files of weights are not the ones that were loaded. `starting`: they
    were loaded just now, and may have been downloaded for it."""
    found = _stamps(model)
    if _loaded:
        changed = [path for path, stamp in found.items() if _loaded.get(path) != stamp]
    else:
        since = 0 if starting else process_start_ns()
        changed = [path for path, stamp in found.items() if since and max(stamp[2:]) >= since]
    if changed:
        raise Unsupported(
            f"{changed[0]} changed after this process loaded the model",
            "start the engine anew: it does not serve these weights",
        )
    _loaded.update(found)


def process_start_ns() -> int:
    """When this process began, by the clock that files are stamped with; to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    booted = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    return booted * 10**9 + ticks * 10**9 // os.sysconf("SC_CLK_TCK")


def _stamps(model: Path) -> Stamps:
    paths = [model] if model.is_file() else weight_files(model)
    found: Stamps = {}
    try:
        for path in paths:
            status = path.stat()
            found[str(path.resolve())] = (
                status.st_ino,
                status.st_size,
                status.st_mtime_ns,
                status.st_ctime_ns,
            )
    except OSError as error:
        raise NotFound(f"cannot read {model}: {error.strerror}", "check the path") from error
    return found
