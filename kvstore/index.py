"""The index: what the files are, in SQLite, rebuildable from them at any time.

The tables are in schema.py. The parent is a foreign key with RESTRICT, so that closure under parent
is the database's doing. Children of a parent are ordered by their token ids as big-endian bytes:
the sibling with the longest common prefix is a neighbour of the asked ids.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvsnap.formats.block import BlockRecord
from kvsnap.formats.errors import Damaged, Vanished
from kvsnap.formats.names import ZERO_PARENT, TokenIds
from kvsnap.kvstore.database import Database
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.schema import COUNT_ALL, INDEX_VERSION, RULES, SCHEMA, TABLES

_DESCENDANTS = """
WITH RECURSIVE below(id) AS (
  SELECT id FROM blocks WHERE parent = :id {only}
  UNION ALL SELECT b.id FROM blocks b JOIN below ON b.parent = below.id {only_b})
UPDATE blocks SET reachable = :reachable WHERE id IN below
"""


@dataclass(frozen=True)
class Row:
    """One block as the index knows it."""

    name: bytes
    start: int
    tokens: bytes
    bytes: int
    synced: int
    """The time of change (ns) of the file that was brought to the device: another file under the
    name, or this row in an index that a power cut set back, does not count as synced. 0: none was.
    FAILED: its content may be lost whatever a later sync says, it has to be written anew."""
    reachable: bool
    lost: str | None
    state: bool = False
    """A state checkpoint, no block."""
    signer: str = ""
    """Who signed the file, as it says."""
    sealed: bool = False
    """Then `tokens` is empty."""
    length: int = 0


@dataclass(frozen=True)
class Entry:
    """A file as the index takes it up."""

    name: bytes
    parent: bytes
    root_id: str
    identity: str
    start: int
    tokens: bytes
    length: int
    state: bool
    size: int
    codec: str
    signer: str = ""
    sealed_for: str = ""
    """Tenant id; empty for a file that is not sealed."""

    @property
    def sealed(self) -> bool:
        return bool(self.sealed_for)


def entry_of(
    record: BlockRecord, size: int, codec: str, signer: str = "", sealed_for: str = ""
) -> Entry:
    """Of a sealed file neither token ids nor the identity: who reads the index has no key."""
    sealed = bool(sealed_for)
    return Entry(
        record.name,
        record.parent,
        record.root_id,
        "" if sealed else record.identity,
        record.start,
        b"" if sealed else big_endian(record.token_ids),
        len(record.token_ids),
        record.is_state,
        size,
        SEALED if sealed else codec,
        signer,
        sealed_for,
    )


SEALED = "sealed"
"""What the index has for the codec of a sealed file."""
FAILED = -1
_ROW = "name, start, tokens, bytes, synced, reachable, lost, state, signer, sealed, length"


def big_endian(token_ids: TokenIds) -> bytes:
    """Token ids as bytes that sort like the ids do."""
    return token_ids.astype(">u4").tobytes()


class Index(Database):
    """The tables of the index, and what is asked of them."""

    schema, rules, tables, version = SCHEMA, f"{COUNT_ALL};\n{RULES}", TABLES, INDEX_VERSION

    def find(self, name: bytes) -> Row | None:
        found = self._rows(f"SELECT {_ROW} FROM blocks WHERE name = ?", [name])
        return found[0] if found else None

    def is_reachable(self, name: bytes) -> bool:
        return bool(self.query("SELECT 1 FROM blocks WHERE name = ? AND reachable = 1", [name]))

    def depth(self, chain: Sequence[bytes]) -> int:
        """How many of a chain's blocks are there and reachable, from the front."""
        return gallop(lambda number: self.is_reachable(chain[number]), len(chain))

    def neighbours(self, root_id: str, parent: bytes, tokens: bytes) -> list[Row]:
        """The reachable children of `parent` next to `tokens` in order: at most one either side."""
        keys = self.query(
            "SELECT r.id, (SELECT id FROM blocks WHERE name = ?) FROM roots r WHERE root_id = ?",
            [parent, root_id],
        )
        if not keys or (keys[0][1] is None and parent != ZERO_PARENT):
            return []
        where = (
            f"SELECT {_ROW} FROM blocks"
            " WHERE root = ? AND parent IS ? AND reachable = 1 AND state = 0 AND sealed = 0"
        )
        after = f"{where} AND tokens >= ? ORDER BY tokens LIMIT 1"
        before = f"{where} AND tokens < ? ORDER BY tokens DESC LIMIT 1"
        return self._rows(after, [*keys[0], tokens]) + self._rows(before, [*keys[0], tokens])

    def states(self, root_id: str, parents: Sequence[bytes], token_ids: TokenIds) -> list[Row]:
        """The reachable state checkpoints that stand on one of the blocks (`ZERO_PARENT`: on none)
        and whose tokens a prompt goes on with there, the deepest first.

        Compared here, by SQLite: thousands may stand on the last block of a system prompt.
        """
        found: list[Row] = []
        where = (
            f"SELECT {_ROW} FROM blocks WHERE state = 1 AND reachable = 1 AND sealed = 0"
            " AND tokens = SUBSTR(?, 4 * start + 1, LENGTH(tokens))"
            " AND root = (SELECT id FROM roots WHERE root_id = ?) AND parent "
        )
        asked = big_endian(token_ids)
        order = " ORDER BY start DESC, LENGTH(tokens) DESC"
        named = [parent for parent in parents if parent != ZERO_PARENT]
        if named:
            marks = ",".join("?" * len(named))
            sql = f"{where} IN (SELECT id FROM blocks WHERE name IN ({marks})) {order}"
            found += self._rows(sql, [asked, root_id, *named])
        if len(named) < len(parents):
            found += self._rows(f"{where} IS NULL {order}", [asked, root_id])
        return found

    def sealed_states(self, root_id: str, parents: Sequence[bytes]) -> list[tuple[bytes, int, int]]:
        """(parent, start, length) of reachable sealed state checkpoints that stand on these blocks
        (`ZERO_PARENT`: on none), each once, the deepest first: at most one a length, whatever number
        of them stands there."""
        select = (
            "SELECT DISTINCT s.start, s.length FROM blocks s WHERE s.state = 1"
            " AND s.reachable = 1 AND s.sealed = 1"
            " AND s.root = (SELECT id FROM roots WHERE root_id = ?) AND s.parent "
        )
        found = list[tuple[bytes, int, int]]()
        for parent in parents:
            where, values = "IS NULL", list[object]([root_id])
            if parent != ZERO_PARENT:
                where, values = "= (SELECT id FROM blocks WHERE name = ?)", [root_id, parent]
            found += [(parent, *row) for row in self.query(select + where, values)]
        return sorted(found, key=lambda one: one[1] + one[2], reverse=True)

    def insert(self, db: sqlite3.Connection, entry: Entry) -> None:
        """Add or renew a block's row inside a transaction; its parent must be there.

        Storing a lost block again makes what follows it reachable.
        """
        root = root_number(db, entry.root_id, entry.identity, entry.sealed_for)
        db.execute("INSERT OR IGNORE INTO totals VALUES (?, ?, 0, 0)", (root, entry.codec))
        parent = None
        reachable = True
        if entry.parent != ZERO_PARENT:
            found = db.execute(
                "SELECT id, reachable FROM blocks WHERE name = ? AND lost IS NULL",
                (entry.parent,),
            ).fetchone()
            if found is None:
                raise Vanished(
                    "the block before this one went from the store while it was saved",
                    "save again",
                )
            parent, reachable = found[0], bool(found[1])
        db.execute(
            "INSERT INTO blocks(name, parent, root, start, tokens, length, sealed, state, bytes, codec,"
            " signer, used, synced, reachable) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
            " ON CONFLICT(name) DO UPDATE SET"
            " parent = excluded.parent, root = excluded.root, start = excluded.start,"
            " tokens = excluded.tokens, length = excluded.length, sealed = excluded.sealed,"
            " state = excluded.state, bytes = excluded.bytes,"
            " codec = excluded.codec, signer = excluded.signer,"
            " used = MAX(used, excluded.used), synced = excluded.synced,"
            " reachable = excluded.reachable, lost = NULL",
            (
                entry.name,
                parent,
                root,
                entry.start,
                entry.tokens,
                entry.length,
                int(entry.sealed),
                int(entry.state),
                entry.size,
                entry.codec,
                entry.signer,
                counter(db, "clock"),
                0,
                int(reachable),
            ),
        )
        settle_chain_bytes(db, entry.name)
        if reachable:
            set_reachable_below(db, entry.name, True)

    def lose(self, db: sqlite3.Connection, name: bytes, reason: str) -> int:
        """Inside a transaction: the block's file is gone. Returns how many follow it, unreachable.

        The row stays with the reason until the block is stored again.
        """
        db.execute("UPDATE blocks SET lost = ?, reachable = 0 WHERE name = ?", (reason, name))
        return set_reachable_below(db, name, False)

    def count_request(self, deepest: bytes | None, reused: int, computed: int) -> None:
        """Note one request; the recency of a whole chain is that of its deepest block."""

        def write(db: sqlite3.Connection) -> None:
            add = {"clock": 1, "requests": 1, "reused_tokens": reused, "computed_tokens": computed}
            for key, amount in add.items():
                db.execute("UPDATE counters SET value = value + ? WHERE name = ?", (amount, key))
            sql = "UPDATE blocks SET used = ?, hits = hits + 1 WHERE name = ?"
            db.execute(sql, (counter(db, "clock"), deepest))

        self.note(write)

    def correct(self, db: sqlite3.Connection, name: bytes, size: int, signer: str) -> None:
        """The file is right and the row is not: believe the file."""
        sql = "UPDATE blocks SET bytes = ?, signer = ? WHERE name = ?"
        db.execute(sql, (size, signer, name))
        settle_chain_bytes(db, name)

    def mark_synced(self, changed: Mapping[bytes, int]) -> bool:
        """Note the files that were brought to the device; False where another process's sync of one
        of them failed meanwhile: that is not to be forgotten."""
        with self.transaction() as db:
            sql = "UPDATE blocks SET synced = ? WHERE name = ? AND lost IS NULL AND synced != ?"
            done = [db.execute(sql, (at, name, FAILED)).rowcount for name, at in changed.items()]
        return all(done)

    def mark_failed(self, names: Sequence[bytes]) -> None:
        with self.transaction() as db:
            sql = "UPDATE blocks SET synced = ? WHERE name = ? AND lost IS NULL"
            db.executemany(sql, [(FAILED, name) for name in names])

    def _rows(self, sql: str, values: Sequence[object]) -> list[Row]:
        """Rows of blocks; a row that cannot be one is damage like any other."""
        try:
            return [_row(found) for found in self.query(sql, values)]
        except Damaged:
            self.discard()
            return [_row(found) for found in self.query(sql, values)]


def root_number(db: sqlite3.Connection, root_id: str, identity: str, sealed_for: str = "") -> int:
    """Of a root with any sealed file the identity is not kept: a plain store may have become an
    encrypted one."""
    sql = (
        "INSERT INTO roots(root_id, identity, tenant) VALUES (?, ?, ?) ON CONFLICT(root_id) DO UPDATE"
        " SET identity = '', tenant = excluded.tenant"
        " WHERE excluded.tenant != '' AND (identity != '' OR tenant = '')"
    )
    db.execute(sql, (root_id, identity, sealed_for))
    found: int = db.execute("SELECT id FROM roots WHERE root_id = ?", (root_id,)).fetchone()[0]
    return found


def set_reachable_below(db: sqlite3.Connection, name: bytes, reachable: bool) -> int:
    """Mark what follows a block; on the way back to reachable lost blocks stop the walk."""
    (number,) = db.execute("SELECT id FROM blocks WHERE name = ?", (name,)).fetchone()
    sql = _DESCENDANTS.format(
        only="AND lost IS NULL" if reachable else "",
        only_b="AND b.lost IS NULL" if reachable else "",
    )
    return db.execute(sql, {"id": number, "reachable": int(reachable)}).rowcount


def settle_chain_bytes(db: sqlite3.Connection, name: bytes) -> None:
    """After a row got another length or parent: the lengths of chains through it follow. A new row
    needs none of this, its trigger did it."""
    found = db.execute(
        "SELECT b.id, b.bytes + COALESCE(p.chain_bytes, 0) - b.chain_bytes FROM blocks b"
        " LEFT JOIN blocks p ON p.id = b.parent WHERE b.name = ?",
        (name,),
    ).fetchone()
    if found is None or not found[1]:
        return
    number, more = found
    below = (
        "WITH RECURSIVE below(id) AS (SELECT :id UNION ALL"
        " SELECT b.id FROM blocks b JOIN below ON b.parent = below.id) "
    )
    leaves = db.execute(
        below + "SELECT COUNT(*) FROM blocks WHERE children = 0 AND id IN below", {"id": number}
    ).fetchone()[0]
    sql = "UPDATE blocks SET chain_bytes = chain_bytes + :more WHERE id IN below"
    db.execute(below + sql, {"id": number, "more": more})
    sql = "UPDATE counters SET value = value + ? WHERE name = 'leaf_chain_bytes'"
    db.execute(sql, (more * leaves,))


def _row(found: tuple) -> Row:
    name, start, tokens, size, synced, reachable, lost, state, signer, sealed, length = found
    if [type(value) for value in found[:5]] != [bytes, int, bytes, int, int]:
        raise Damaged("a row of the index has values of other types")
    impossible = lost is not None and (reachable or not isinstance(lost, str))
    impossible = impossible or type(length) is not int
    if len(name) != 32 or len(tokens) % 4 or impossible:
        raise Damaged("a row of the index has impossible values")
    return Row(
        name,
        start,
        tokens,
        size,
        synced,
        bool(reachable),
        lost,
        bool(state),
        str(signer),
        bool(sealed),
        length,
    )


def counter(db: sqlite3.Connection, name: str) -> int:
    found = db.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()
    if found is None or type(found[0]) is not int:
        raise sqlite3.DatabaseError(f"the counter {name} is missing")
    value: int = found[0]
    return value
