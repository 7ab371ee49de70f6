"""Whether a picture can be drawn, asked before the long work whose result it is to show."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from kvsnap.formats.errors import NotFound, Unsupported, UsageError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raises where matplotlib is missing, or could not write a picture to `path`."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path} is neither .png nor .svg", "end the name with one of them")
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
        raise NotFound(f"nothing can be written to {path}", "make its folder, or name another file")
    if find_spec("matplotlib") is None:
        raise Unsupported("matplotlib is not installed", "pip install 'kvsnap[plot]'")
