"""The block files of a store: in order, waited for, damaged."""

from __future__ import annotations

import time
from pathlib import Path

from kvsnap.formats.block import parse_block
from kvsnap.kvstore.place import Place


def block_files(store: Path) -> list[Path]:
    """Sorted by the position of the block's first token."""
    found = [path for path in Place(store).blocks.rglob("*") if path.is_file()]
    return sorted(found, key=lambda path: (_start(path), path.name))


def quarantined(store: Path) -> list[Path]:
    found = Place(store).quarantine.rglob("*.safetensors.*")
    return [path for path in found if path.suffix != ".reason"]


def damage(path: Path, how: str) -> None:
    """`flip` a bit of the rows, `cut` the file in the middle, `remove` it, or `change` a byte in front."""
    if how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-1] ^= 1
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "change":
        data[20] ^= 1
    path.write_bytes(data)


def wait_for_blocks(store: Path, count: int, seconds: float = 60.0) -> None:
    """Until so many are there: they are written behind the engine's back."""
    until = time.monotonic() + seconds
    while len(list(Place(store).blocks.rglob("*.safetensors"))) < count:
        if time.monotonic() > until:
            raise TimeoutError(f"{store} has no {count} blocks after {seconds} seconds")
        time.sleep(0.02)


def _start(path: Path) -> int:
    return parse_block(memoryview(path.read_bytes())).record.start
