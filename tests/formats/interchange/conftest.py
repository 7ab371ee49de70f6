"""Real llama.cpp state files, and states written word by word from the format's description."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).parents[2] / "golden" / "foreign"
HEAD = struct.pack("<Ii", 0xAF143CD8, 0)


@dataclass(frozen=True)
class Sample:
    name: str
    expected: dict[str, Any]
    version: int
    token_ids: list[int]
    state: memoryview
    """The STATE part: what follows the token list."""


@pytest.fixture(scope="session")
def sample() -> Callable[[str], Sample]:
    """A `ggsq` file, split: u32 magic | u32 version | u32 n | n words | STATE."""
    expected = json.loads((SAMPLES / "expected.json").read_text("utf-8"))["files"]

    def read(name: str) -> Sample:
        data = (SAMPLES / name).read_bytes()
        magic, version, count = struct.unpack_from("<III", data)
        assert magic == 0x67677371
        words = struct.unpack_from(f"<{count}i", data, 12)
        # llama-server packs -1 | 1 | n | ids | n_media in front; older writers give the ids alone.
        ids = list(words[3:-1]) if words[0] == -1 else list(words)
        return Sample(name, expected[name], version, ids, memoryview(data)[12 + 4 * count :])

    return read


def _state(
    *,
    cells: int = 3,
    positions: Sequence[int] | None = None,
    n_seq: int = 1,
    extension: int = 0,
    v_trans: int = 0,
    version: int = 3,
    layers: int = 2,
    k: tuple[int, int] = (1, 8),
    v: tuple[int, int] = (1, 4),
    head: bytes = HEAD,
    streams: Sequence[int] = (1,),
    last: bytes = b"",
) -> bytes:
    """`k` and `v` are (ggml type, bytes a row); `streams` says which streams hold the cells."""
    words = [struct.pack("<I", len(streams))]
    for used in streams:
        words.append(struct.pack("<I", cells if used else 0))
        if not used:
            continue
        for position in range(cells) if positions is None else positions:
            words.append(struct.pack("<iI", position, n_seq))
            words.append(bytes(4 * (extension + n_seq)))
        words.append(struct.pack("<II", v_trans, layers))
        if version >= 4:
            words.append(struct.pack("<II", 0, 0))
        for number, width in [k] * layers:
            words.append(struct.pack("<iQ", number, width) + bytes(width * cells))
        for number, width in [v] * layers:
            item = {0: 4, 2: 18, 8: 34}.get(number, 2)
            columns = struct.pack("<iII", number, item, width // item)
            words.append(columns if v_trans else struct.pack("<iQ", number, width))
            words.append(bytes(width * cells))
    return head + b"".join(words) + last


@pytest.fixture(scope="session")
def state() -> Callable[..., bytes]:
    return _state
