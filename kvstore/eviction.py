"""Plan what goes, show it, apply it: `gc --dry-run` prints the very plan that `gc` applies.

A plan is made without changing anything. Applying looks at each block again inside the transaction
that deletes it: one that was used, pinned, leased or continued meanwhile stays.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvsnap.kvstore import events, files
from kvsnap.kvstore.holds import Holds
from kvsnap.kvstore.index import Index
from kvsnap.kvstore.place import Place
from kvsnap.kvstore.policy import Above, Leaf, inherited, leaf_lru
from kvsnap.kvstore.unfinished import Unfinished

FIRST_PAGE, PAGE = 4, 256
"""Leaves fetched at once while planning: few at first, as most plans are for one block, then twice
as many each time. With 256 at once an eviction took 1.3x as long."""
CLEAR_BYTES = 2_000_000
"""Enough for the index's log to begin with."""
BATCH = 16
"""Blocks deleted in one transaction: others wait for that long, some milliseconds."""


@dataclass(frozen=True)
class Victim:
    """A block that may go. `used` is its time by then: if another one is met, it was used."""

    number: int
    name: bytes
    bytes: int
    used: int


@dataclass
class Plan:
    """What goes, in this order. `short`: bytes that cannot be freed, because all else is held."""

    unfinished: list[tuple[Path, int]] = field(default_factory=list)
    quarantined: list[tuple[Path, int]] = field(default_factory=list)
    blocks: list[Victim] = field(default_factory=list)
    short: int = 0

    @property
    def bytes(self) -> int:
        files_of = [size for _, size in (*self.unfinished, *self.quarantined)]
        return sum(files_of) + sum(victim.bytes for victim in self.blocks)


@dataclass
class Freed:
    """What really went."""

    blocks: list[bytes] = field(default_factory=list)
    bytes: int = 0


class Eviction:
    """Leaf-only LRU over the index of one store."""

    def __init__(self, place: Place, index: Index, holds: Holds, unfinished: Unfinished) -> None:
        self.place, self.index, self.holds, self.unfinished = place, index, holds, unfinished

    def make_room(self, need: int) -> bool:
        """Free about `need` bytes; False where that many cannot go, and then none do."""
        with self.index.transaction() as db:
            self.holds.end_dead(db)
        self.unfinished.recount()
        plan = self.plan(need)
        if plan.short > 0:
            return False  # the write fails anyhow: nothing goes for it
        self.apply(plan)
        return True  # another process may have been faster with these: ask again

    def plan(self, need: int) -> Plan:
        """What frees `need` bytes: dead writers' files in any case, then quarantine, then the least
        recently used leaves."""
        plan = Plan(unfinished=list(self.unfinished.over()))
        need -= plan.bytes
        for path, size, _ in sorted(files.sizes(self.place.quarantine), key=lambda found: found[2]):
            if need <= 0:
                return plan
            plan.quarantined.append((path, size))
            need -= size
        tree = _IndexTree(self.index)
        victims = leaf_lru(tree)
        while need > 0:
            number = next(victims, None)
            if number is None:
                young = [found for found in self.unfinished.dead() if found not in plan.unfinished]
                plan.unfinished += young  # nobody mourns them: better than to refuse a save
                plan.short = need - sum(size for _, size in young)
                break
            victim = tree.victims[number]
            plan.blocks.append(victim)
            need -= victim.bytes
        return plan

    def clear_a_full_disk(self) -> None:
        """Delete some files where not even the index has room for its log: dead writers', quarantine,
        or else the first blocks that would go. Their rows follow as soon as there is room; killed
        before that, they are damage that the next save mends.

        No block goes while the index can only be read without its log: that may hold pins.
        """
        need = CLEAR_BYTES
        aside = [(path, size) for path, size, _ in files.sizes(self.place.quarantine)]
        for path, size in [*self.unfinished.dead(), *aside]:
            with contextlib.suppress(OSError):
                path.unlink()
                need -= size
        if need > 0 and self.index.lacks_its_log():
            return
        tree, gone = _IndexTree(self.index), list[Victim]()
        victims = leaf_lru(tree)
        while need > 0 and (number := next(victims, None)) is not None:
            victim = tree.victims[number]
            with contextlib.suppress(OSError):
                self.place.block(victim.name).unlink()
                gone.append(victim)
                events.block_evicted(victim.bytes)
                need -= victim.bytes
        with self.index.transaction() as db:
            for victim in gone:
                sql = "DELETE FROM blocks WHERE name = ? AND children = 0 AND holds = 0"
                db.execute(sql, (victim.name,))

    def apply(
        self, plan: Plan, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Freed:
        """Delete what the plan says and still may go. A file that is gone already counts as done;
        one that cannot be deleted stays."""
        freed = Freed()
        freed.bytes += self.unfinished.clean(plan.unfinished) if plan.unfinished else 0
        for path, size in plan.quarantined:
            with contextlib.suppress(OSError):
                path.unlink()
                freed.bytes += size
        for at in range(0, len(plan.blocks), BATCH):
            batch = plan.blocks[at : at + BATCH]
            with self.index.transaction() as db:
                going = [victim for victim in batch if self._let_go(db, victim)]
            with self.index.transaction() as db:
                for victim in going:
                    if self.unfinished.finish(db, victim.name) and victim.bytes:
                        freed.blocks.append(victim.name)
                        events.block_evicted(victim.bytes)
                        freed.bytes += victim.bytes
            progress(min(at + BATCH, len(plan.blocks)), len(plan.blocks))
        return freed

    def _let_go(self, db: sqlite3.Connection, victim: Victim) -> bool:
        """Delete the row inside the caller's transaction, if the block still may go.

        The file goes in the next one: killed in between, a file without a row is left, which harms
        nobody. The other way round it would be a row without a file: damage.
        """
        row = db.execute(
            "SELECT lost FROM blocks WHERE id = ? AND name = ? AND used = ? AND children = 0"
            " AND holds = 0",
            (victim.number, victim.name, victim.used),
        ).fetchone()
        if row is None:
            return False
        db.execute("DELETE FROM blocks WHERE id = ?", (victim.number,))
        self.unfinished.note_block(db, victim.name, victim.bytes)
        if row[0] is None:
            db.execute("UPDATE counters SET value = value + 1 WHERE name = 'evicted_blocks'")
        return True


class _IndexTree:
    """The index as a policy asks of it; `victims` remembers what was named."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.victims: dict[int, Victim] = {}

    def leaves(self) -> Iterator[Leaf[int]]:
        leaves = (
            "SELECT used, id, name, bytes, lost FROM blocks WHERE children = 0 AND holds = 0 AND"
        )
        # Two queries, not (used, id) > (?, ?): of that SQLite looks up `used` alone, and a hundred
        # thousand blocks that were stored without a request have one time.
        same = f"{leaves} used = ? AND id > ? ORDER BY id LIMIT ?"
        later = f"{leaves} used > ? ORDER BY used, id LIMIT ?"
        used, number, size = -(2**62), 0, FIRST_PAGE
        while page := (
            self.index.query(same, [used, number, size]) or self.index.query(later, [used, size])
        ):
            for used, number, name, length, lost in page:
                self.victims[number] = Victim(number, name, 0 if lost else length, used)
                yield Leaf(used, number, number)
            size = min(2 * size, PAGE)

    def above(self, block: int) -> Above[int] | None:
        sql = (
            "SELECT p.id, p.used, p.children, p.holds, p.name, p.bytes, p.lost"
            " FROM blocks b JOIN blocks p ON p.id = b.parent WHERE b.id = ?"
        )
        found = self.index.query(sql, [block])
        if not found:
            return None
        number, used, children, held, name, size, lost = found[0]
        passed = inherited(used, self.victims[block].used)
        self.victims[number] = Victim(number, name, 0 if lost else size, passed)
        return Above(number, used, number, children, held > 0)
