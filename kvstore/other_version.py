"""What a store of another format version holds, as far as that can be told without understanding it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvsnap.formats.container import MAX_HEADER, header_size, parse_header
from kvsnap.formats.errors import KvsnapError
from kvsnap.formats.fields import FORMAT_VERSION
from kvsnap.kvstore import files
from kvsnap.kvstore.place import Place

_SHOWN = 10


def what_it_holds(place: Place) -> tuple[str, str]:
    """In one line, and what to do. Nothing is changed: the kvsnap that wrote it can still read it."""
    blocks = [size for folder in _folders(place.blocks) for _, size, _ in files.sizes(folder)]
    sessions = sorted(
        path for folder in _folders(place.sessions) for path, *_ in files.sizes(folder)
    )
    versions = sorted({_field(path, "kvsnap") for path in sessions})
    names = [repr(_field(path, "name")) for path in sessions[:_SHOWN]]
    what = f"it holds {len(blocks)} block files of {sum(blocks)} bytes, {len(sessions)} sessions"
    if sessions:
        more = " …" if len(sessions) > _SHOWN else ""
        what += f" of format version {', '.join(versions)}: {', '.join(names)}{more}"
    return what, (
        f"blocks are a cache: save these prompts again in a new store, of version {FORMAT_VERSION},"
        " then delete this folder"
    )


def _folders(above: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in above.iterdir() if files.is_folder(path)]
    return []


def _field(path: Path, key: str) -> str:
    """A field of a file's header, whatever its version."""
    with contextlib.suppress(OSError, KvsnapError), path.open("rb") as handle:
        start = header_size(handle.read(8))
        metadata = parse_header(handle.read(min(start, MAX_HEADER) - 8)).get("__metadata__")
        if isinstance(metadata, dict) and isinstance(metadata.get(key), str):
            return str(metadata[key])[:200]
    return "?"
