"""A block whose record was edited and signed again is set aside, and mended by the next save."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from kvsnap.formats.container import header_size
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(65)


def forge(path: Path, **fields: str) -> None:
    """Edit header fields and make the file digest fit again."""
    data = path.read_bytes()
    start = header_size(data[:8])
    header = json.loads(data[8:start])
    header["__metadata__"].update(fields, file="0" * 64)
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    whole = len(text).to_bytes(8, "little") + text + data[start:]
    digest = blake3(whole).hexdigest().encode()
    path.write_bytes(whole.replace(b'"file":"' + b"0" * 64, b'"file":"' + digest))


@pytest.mark.parametrize(
    "fields",
    [
        {"start": "48"},
        {"identity": '{"weights":"x"}'},
        {"root_id": "ab" * 32},
        {"parent": "cd" * 32},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_forged_record_is_never_used_and_is_stored_anew(
    open_store: Callable[[], Store], fields: dict[str, str]
) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS)
    names = store.index.query("SELECT name FROM blocks ORDER BY start")
    forge(store.place.block(names[1][0]), **fields)
    engine = StampedEngine()
    done = turn(open_store(), engine, IDS)
    engine.check_rows()
    assert done.resumed.reused_tokens == 16
    assert done.saved is not None
    assert done.saved.blocks_written == 1
    assert verify_store(open_store()).bad == []
    assert turn(open_store(), StampedEngine(), IDS, save=False).resumed.reused_tokens == 64
