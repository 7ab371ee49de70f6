"""Files that lie about themselves cannot break a rebuild, or hide an honest block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.container import header_size
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(65)
Opener = Callable[[], Store]


def rewrite_header(path: Path, **fields: str) -> None:
    """Change header fields of a block file; its digest no longer fits, as a rebuild may find."""
    data = path.read_bytes()
    start = header_size(data[:8])
    header = json.loads(data[8:start])
    header["__metadata__"].update(fields)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


def blocks_in_order(store: Store) -> list[Path]:
    names = store.index.query("SELECT name FROM blocks ORDER BY start")
    return [store.place.block(name) for (name,) in names]


@pytest.mark.parametrize("identity", ["\ud800", "é", "{}", "[" * 5000, '{"block_size": "x"}'])
@pytest.mark.parametrize("settings", [True, False], ids=["settings", "no settings"])
def test_a_garbage_identity_leaves_the_other_blocks_usable(
    open_store: Opener, store_path: Path, identity: str, settings: bool
) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS)
    rewrite_header(blocks_in_order(store)[3], identity=identity)
    (store_path / "index.sqlite3").unlink()
    if not settings:
        (store_path / "kvsnap.json").unlink()
    engine = StampedEngine()
    opened = open_store()
    done = turn(opened, engine, IDS, save=False)
    engine.check_rows()
    if opened.block_size == 16:
        assert done.resumed.reused_tokens == 48


def test_a_lying_start_does_not_hide_the_block_before(open_store: Opener, store_path: Path) -> None:
    store = open_store()
    turn(store, StampedEngine(), IDS)
    rewrite_header(blocks_in_order(store)[3], start="0")
    (store_path / "index.sqlite3").unlink()
    engine = StampedEngine()
    assert turn(open_store(), engine, IDS, save=False).resumed.reused_tokens == 48
    engine.check_rows()
