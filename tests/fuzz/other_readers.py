"""What a reader does with inputs that are no safetensors files: portable files, states of an engine,
settings, keys. See `readers`.
"""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.formats import archive as tar
from kvsnap.formats.interchange.llamacpp import State, order_of, parse_state, read_head
from kvsnap.formats.interchange.llamacpp_memory import Recurrent, parse_memory
from kvsnap.formats.interchange.state_bytes import Reader
from kvsnap.formats.tenant import Tenant, parse_key
from kvsnap.kvstore.budget import budget
from kvsnap.kvstore.place import Place, Settings, read_settings
from kvsnap.kvstore.remotes.archive import Archive
from tests.fuzz.inputs import as_buffer, as_file, folder, passes


def member_past(data: bytes) -> bool:
    return passes(lambda: list(itertools.islice(_members(data), 1)))


def _members(data: bytes) -> Any:
    return tar.members(lambda at, count: data[at : at + count], len(data))


def archive_bytes(data: bytes) -> list[tar.Member]:
    found = list(_members(data))
    assert all(0 <= m.start <= m.start + m.size <= len(data) for m in found)
    return found


def archive_file(data: bytes) -> list[int]:
    """Opened as a remote, every member read."""
    with Archive.open(as_file(data, "input.kvsnap")) as found:
        entries = list(found.list(""))
        return [len(found.get(entry.key, len(data)).data) for entry in entries]


def magic_past(data: bytes) -> bool:
    return passes(lambda: read_head(Reader(as_buffer(data))))


def attention_state(version: int, data: bytes) -> State:
    return parse_state(as_buffer(data), version)


def several_states(recurrent: bool, data: bytes) -> list[State | Recurrent]:
    kinds: list[type[State | Recurrent]] = [State, State, *([Recurrent] if recurrent else [])]
    return parse_memory(as_buffer(data), 3, kinds)


def in_order(found: State | list[State | Recurrent]) -> None:
    for part in found if isinstance(found, list) else [found]:
        if isinstance(part, State):
            order = order_of(part.positions, 0, len(part.positions))
            for rows in (*part.k, *part.v):
                np.array(rows if order is None else rows[order])
        else:
            for area in (*part.r, *part.s):
                np.array(area)


def json_past(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def settings(data: bytes) -> Settings:
    as_file(data, "kvsnap.json")
    return read_settings(_place())


def asked_budget(found: Settings) -> None:
    budget(_place().root, (found.capacity, found.min_free))


@functools.cache
def _place() -> Place:
    return Place(Path(folder()))


def everything_past(data: bytes) -> bool:
    return True


def key(data: bytes) -> Tenant:
    found = parse_key(data)
    assert len(found.tenant_id) == 64
    assert repr(found) == "Tenant()"
    return found
