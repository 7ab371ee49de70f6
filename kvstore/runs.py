"""The stored trees with every run of blocks between two branches as one node, in arrays.

How often a prefix was reused is the sum over all that follows it, so all rows are read once, page
by page, without their token ids: a million blocks take some seconds. Nothing here recurses: a
chain may be a hundred thousand blocks long.

State checkpoints make no branch: they count with the block that they stand on, its reuse included.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvsnap.kvstore.index import Index

PAGE = 20_000
NONE = -1
_COLUMNS = "id, COALESCE(parent, 0), start, length, bytes, hits, used, reachable, state"
Numbers = NDArray[np.int64]


class Runs:
    """Arrays with one element a run; `above` is the run before, or NONE.

    `first`, `last`: row ids of its end blocks. `states`: checkpoints on its blocks; `bytes`: of
    both. `unusable`: blocks of it that are lost or stand behind a lost one. `reused`, `used`: hits
    of all from here on, and the latest request.
    """

    def __init__(self, index: Index, of: str = "1") -> None:
        """`of`: SQL that holds for the blocks to read."""
        *columns, state = _read(index, of)
        blocks = [column[state == 0] for column in columns]
        self._ids, parents, starts, tokens, sizes, hits, used, reachable = blocks
        states = _add_states(blocks, [column[state != 0] for column in columns])
        above = _positions(self._ids, parents)
        followers = np.bincount(above[above != NONE], minlength=len(above))
        heads_run = (above == NONE) | (followers[above] != 1)
        self._run = _run_of_each(above, heads_run)
        heads = np.flatnonzero(heads_run)
        ends = np.flatnonzero(followers != 1)
        ends = ends[self._run[ends] != NONE]
        self.first, self.start = self._ids[heads], starts[heads]
        self.last = np.zeros_like(self.first)
        self.last[self._run[ends]] = self._ids[ends]
        self.blocks, self.states = self._total(np.ones_like(tokens)), self._total(states)
        self.tokens, self.bytes = self._total(tokens), self._total(sizes)
        self.unusable = self._total(1 - reachable)
        self.above = np.where(above[heads] == NONE, NONE, self._run[above[heads]])
        latest = np.zeros_like(self.first)
        known = self._run != NONE
        np.maximum.at(latest, self._run[known], used[known])
        self.reused, self.used = _with_all_below(self.above, self.start, self._total(hits), latest)
        self._order = np.argsort(self.above, kind="stable")
        self._edges = np.searchsorted(self.above[self._order], np.arange(len(heads) + 1))

    def __len__(self) -> int:
        return len(self.first)

    def of_block(self, row_id: int) -> int:
        """The run that a block is in; NONE for one that was stored only just now."""
        (at,) = _positions(self._ids, np.array([row_id]))
        return NONE if at == NONE else int(self._run[at])

    def below(self, run: int) -> list[int]:
        """The runs that follow one; of NONE those that begin a tree."""
        first = 0 if run == NONE else self._edges[run]
        stop = self._edges[0] if run == NONE else self._edges[run + 1]
        found: list[int] = self._order[first:stop].tolist()
        return found

    def path_to(self, run: int) -> list[int]:
        """The run and all before it, from the first one on."""
        found: list[int] = []
        while run != NONE and len(found) <= len(self):
            found.append(run)
            run = int(self.above[run])
        return found[::-1]

    def _total(self, values: Numbers) -> Numbers:
        """The sum over each run's blocks; exact, as no store has 2^53 bytes."""
        known = self._run != NONE
        sums = np.bincount(self._run[known], values[known], minlength=len(self.first))
        return sums.astype(np.int64)


def _read(index: Index, of: str) -> list[Numbers]:
    """The columns of all blocks, in order of id. Values that are no numbers are damage: the index
    is built anew from the files."""
    try:
        return _columns(_pages(index, of))
    except (TypeError, ValueError, OverflowError):
        index.discard()
        return _columns(_pages(index, of))


def _add_states(blocks: list[Numbers], states: list[Numbers]) -> Numbers:
    """Add bytes and hits of checkpoints to the blocks that they stand on, in place, and the time of
    the latest; how many stand on each. One before the first block stands on none."""
    ids, _, _, _, sizes, hits, used, _ = blocks
    _, parents, _, _, more, reused, latest, _ = states
    on = _positions(ids, parents)
    there = on != NONE
    on = on[there]
    np.add.at(sizes, on, more[there])
    np.add.at(hits, on, reused[there])
    np.maximum.at(used, on, latest[there])
    return np.bincount(on, minlength=len(ids)).astype(np.int64)


def _pages(index: Index, of: str) -> Iterator[list[tuple]]:
    sql = f"SELECT {_COLUMNS} FROM blocks WHERE id > ? AND {of} ORDER BY id LIMIT {PAGE}"
    last = 0
    while page := index.query(sql, [last]):
        yield page
        last = page[-1][0]


def _columns(pages: Iterator[list[tuple]]) -> list[Numbers]:
    width = _COLUMNS.count(",")  # one comma is COALESCE's
    parts = [np.array(page, dtype=np.int64) for page in pages]
    table = np.concatenate([np.empty((0, width), np.int64), *parts])
    return [np.ascontiguousarray(column) for column in table.T]


def _positions(ids: Numbers, wanted: Numbers) -> Numbers:
    """Where each wanted id stands in the sorted `ids`; NONE where it does not."""
    if not len(ids):
        return np.full(len(wanted), NONE)
    at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
    return np.where(ids[at] == wanted, at, NONE)


def _run_of_each(above: Numbers, heads_run: NDArray[np.bool_]) -> Numbers:
    """The number of each block's run: every step looks twice as far towards the run's head."""
    head = np.where(heads_run, np.arange(len(above)), above)
    for _ in range(max(1, len(above).bit_length())):
        further = head[head]
        if np.array_equal(further, head):
            break
        head = further
    number = np.cumsum(heads_run) - 1
    return np.where(heads_run[head], number[head], NONE)  # a ring has no head: damage


def _with_all_below(
    above: Numbers, start: Numbers, hits: Numbers, used: Numbers
) -> tuple[Numbers, Numbers]:
    """Sums of hits, and the latest use, over each run and all that follows it."""
    sums, latest, up = hits.tolist(), used.tolist(), above.tolist()
    for run in np.argsort(-start, kind="stable").tolist():  # what follows begins later
        if (parent := up[run]) != NONE:
            sums[parent] += sums[run]
            latest[parent] = max(latest[parent], latest[run])
    return np.array(sums, np.int64), np.array(latest, np.int64)
