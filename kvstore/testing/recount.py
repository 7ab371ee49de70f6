"""What the index counts, counted again: from the files, and from the rows one by one."""

from __future__ import annotations

import contextlib

from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.rebuild import block_paths, read_record
from kvsnap.kvstore.store import Store


def disk_bytes(place: Place) -> int:
    """The lengths of all files that the budget counts, as `du` would add them up."""
    folders = (place.blocks, place.sessions, place.temporary, place.quarantine, place.calibrations)
    sizes = 0
    for path in [path for folder in folders for path in folder.rglob("*")]:
        try:
            sizes += path.lstat().st_size if path.is_file() else 0
        except FileNotFoundError:  # others are at work
            continue
    return sizes


def stored_blocks(place: Place) -> dict[bytes, tuple[bytes, int]]:
    """Name → (parent, bytes) of every block file, from its own header; foreign files are passed
    over."""
    found = dict[bytes, tuple[bytes, int]]()
    for path in block_paths(place):
        with contextlib.suppress(KvsnapError, OSError):
            item = read_record(path)
            found[item.record.name] = (item.record.parent, item.size)
    return found


def assert_closed(store: Store) -> None:
    """No block without the one before it: neither as a file nor as a row."""
    there = stored_blocks(store.place)
    alone = [name.hex()[:12] for name, (parent, _) in there.items() if not _is(parent, there)]
    assert not alone, f"files without the block before them: {alone}"
    rows = store.index.query(
        "SELECT b.start, p.id, p.lost, p.reachable FROM blocks b LEFT JOIN blocks p"
        " ON p.id = b.parent WHERE b.lost IS NULL AND b.reachable = 1"
    )
    for start, parent, lost, reachable in rows:
        assert (parent is None) == (start == 0)
        assert parent is None or (lost is None and reachable == 1)


def assert_counts(store: Store) -> None:
    """Every count that triggers keep is what a recount gives, and `used` is what the disk holds."""
    query = store.index.query
    differing = {
        "children": "SELECT COUNT(*) FROM blocks c WHERE c.parent = b.id",
        "holds": "SELECT COUNT(*) FROM holds h WHERE h.block = b.id",
        "chain_bytes": "SELECT b.bytes + COALESCE(SUM(p.chain_bytes), 0) FROM blocks p"
        " WHERE p.id = b.parent",
    }
    for column, recount in differing.items():
        sql = f"SELECT id, {column}, ({recount}) FROM blocks b WHERE {column} != ({recount})"
        assert query(sql) == [], column
    totals = "SELECT root, codec, blocks, bytes FROM totals WHERE blocks != 0 OR bytes != 0"
    counted = (
        "SELECT root, codec, COUNT(*), SUM(bytes) FROM blocks WHERE lost IS NULL GROUP BY 1, 2"
    )
    assert sorted(query(totals)) == sorted(query(counted))
    for counter, sql in [
        ("leaf_chain_bytes", "SELECT SUM(chain_bytes) FROM blocks WHERE children = 0"),
        ("session_bytes", "SELECT SUM(bytes) FROM sessions"),
    ]:
        kept = query("SELECT value FROM counters WHERE name = ?", [counter])[0][0]
        assert kept == (query(sql)[0][0] or 0), counter
    assert store.space.used() == disk_bytes(store.place)


def _is(parent: bytes, there: dict[bytes, tuple[bytes, int]]) -> bool:
    return parent == bytes(32) or parent in there
