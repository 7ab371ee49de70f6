"""The tree of shared prefixes, as much of it as a person can look at: the most reused first."""

from __future__ import annotations

import heapq
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvsnap.formats.errors import Damaged, NotFound
from kvsnap.formats.identity import parse_identity
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.gallop import gallop
from kvsnap.kvstore.index import SEALED
from kvsnap.kvstore.inspect import find_block
from kvsnap.kvstore.runs import NONE, Runs
from kvsnap.kvstore.session_list import SEALED_SESSION
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.whose_blocks import own_blocks

LIMIT = 100
_CHUNK = 500
_BLOCK = "CASE WHEN blocks.state = 1 THEN blocks.parent ELSE blocks.id END"
"""Of a row: the block itself, or the one that a checkpoint stands on."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A run of blocks without a branch. `id` counts in the order of drawing, `parent` is the id of
    the run before, None for the first of a tree. `states`: checkpoints that stand on its blocks;
    `bytes`: of both.

    `reused`: requests whose reuse ended in it or in anything that follows it. `sessions`: those
    whose chain ends in it. `pinned`, `leased`: one that keeps it and all before stands in it.
    `unusable`: blocks of it that are lost, or wait behind a lost one; `lost` is the reason.
    `omitted`: branches after it that are not in the list.
    """

    id: int
    parent: int | None
    start: int
    tokens: int
    blocks: int
    states: int = 0
    bytes: int
    reused: int
    first_block: str
    last_block: str
    root_id: str
    architecture: str
    sessions: tuple[str, ...]
    pinned: bool
    leased: bool
    unusable: int
    lost: str | None
    on_path: bool
    omitted: int


@dataclass(frozen=True)
class Tree:
    """`nodes` in the order of drawing: each after its parent. `omitted`: whole trees left out."""

    nodes: tuple[Node, ...]
    omitted: int


def deepest_block(store: Store, tenant: Tenant | None, what: str) -> bytes | None:
    """The last block that is known of a session's chain (None: there is none), or the block or
    checkpoint whose name begins with `what`. Raises `NotFound`."""
    store.keys.add(tenant)
    try:
        chain = store.sessions.load(tenant_id(tenant), what).record.chain
    except NotFound:
        return find_block(store, what, tenant)[0]
    depth = gallop(lambda number: store.index.find(chain[number]) is not None, len(chain))
    return chain[depth - 1] if depth else None


def read_tree(
    store: Store,
    limit: int = LIMIT,
    block: bytes | None = None,
    tenant: Tenant | None = None,
) -> Tree:
    """All trees (with a key those of its tenant), or the one that `block` is in, with its path marked.
    Of more than `limit` nodes the path goes first, then the most reused."""
    store.keys.add(tenant)
    target, of = None, own_blocks(store, tenant)
    if block is not None:
        found = store.index.query(f"SELECT {_BLOCK}, root FROM blocks WHERE name = ?", [block])
        if not found or found[0][0] is None:
            return Tree((), 0)
        target, of = found[0][0], f"root = {int(found[0][1])}"
    runs = Runs(store.index, of)
    path = runs.path_to(runs.of_block(target)) if target is not None else []
    tops = path[:1] if path else runs.below(NONE)
    chosen = _choose(runs, tops, set(path), limit)
    facts = _Facts(store, runs, chosen, tenant.tenant_id if tenant is not None else None)
    numbers: dict[int, int] = {}
    nodes: list[Node] = []
    for run in _drawing_order(runs, tops, chosen):
        numbers[run] = len(nodes)
        above = int(runs.above[run])
        root_id, architecture = facts.roots.get(run, ("", ""))
        nodes.append(
            Node(
                id=len(nodes),
                parent=None if above == NONE else numbers[above],
                start=int(runs.start[run]),
                tokens=int(runs.tokens[run]),
                blocks=int(runs.blocks[run]),
                states=int(runs.states[run]),
                bytes=int(runs.bytes[run]),
                reused=int(runs.reused[run]),
                first_block=facts.names.get(int(runs.first[run]), ""),
                last_block=facts.names.get(int(runs.last[run]), ""),
                root_id=root_id,
                architecture=architecture,
                sessions=tuple(sorted(facts.sessions[run])),
                pinned="pin" in facts.holds[run],
                leased="lease" in facts.holds[run],
                unusable=int(runs.unusable[run]),
                lost=facts.lost.get(run),
                on_path=run in path,
                omitted=sum(child not in chosen for child in runs.below(run)),
            )
        )
    return Tree(tuple(nodes), sum(top not in chosen for top in tops))


def _choose(runs: Runs, tops: Iterable[int], path: set[int], limit: int) -> set[int]:
    """The best nodes: never one without the one before it, as that is at least as good."""
    heap = [(run not in path, *_rank(runs, run)) for run in tops]
    heapq.heapify(heap)
    chosen: set[int] = set()
    while heap and len(chosen) < limit:
        run = heapq.heappop(heap)[-1]
        chosen.add(run)
        for child in runs.below(run):
            heapq.heappush(heap, (child not in path, *_rank(runs, child)))
    return chosen


def _rank(runs: Runs, run: int) -> tuple[int, int, int]:
    """Most reused first, then used last."""
    return -int(runs.reused[run]), -int(runs.used[run]), run


def _drawing_order(runs: Runs, tops: Iterable[int], chosen: set[int]) -> Iterator[int]:
    stack = _sorted(runs, tops, chosen)
    while stack:
        run = stack.pop()
        yield run
        stack += _sorted(runs, runs.below(run), chosen)


def _sorted(runs: Runs, found: Iterable[int], chosen: set[int]) -> list[int]:
    """The chosen ones, the first to draw at the end."""
    return sorted(chosen & set(found), key=lambda run: _rank(runs, run), reverse=True)


class _Facts:
    """What the index says of the chosen runs beyond numbers, by run. A block that was evicted since
    the numbers were read has no name any more."""

    def __init__(self, store: Store, runs: Runs, chosen: set[int], tenant_id: str | None) -> None:
        self.store = store
        self.names: dict[int, str] = {}
        self.roots: dict[int, tuple[str, str]] = {}
        self.sessions: dict[int, list[str]] = defaultdict(list)
        self.holds: dict[int, set[str]] = defaultdict(set)
        self.lost: dict[int, str] = {}
        self._read_names(runs, chosen)
        query = store.index.query
        for row, reason in query(
            "SELECT id, lost FROM blocks WHERE lost IS NOT NULL AND state = 0 ORDER BY start"
        ):
            self.lost.setdefault(runs.of_block(row), reason)
        sql = f"SELECT kind, {_BLOCK} FROM holds JOIN blocks ON blocks.id = block WHERE until >= ?"
        for kind, row in query(sql, [time.time()]):
            if row is None:  # a checkpoint before the first block
                continue
            self.holds[runs.of_block(row)].add(kind)
        ends = defaultdict(list)
        for *_, facts in store.listing.refresh(tenant_id):
            if facts.last:
                ends[bytes.fromhex(facts.last)].append(facts.name or SEALED_SESSION)
        for row, name in self._in_chunks("SELECT id, name FROM blocks WHERE name IN", list(ends)):
            self.sessions[runs.of_block(row)] += ends[name]

    def _read_names(self, runs: Runs, chosen: set[int]) -> None:
        roots = {
            number: (root_id, _architecture(identity))
            for number, root_id, identity in self.store.index.query(
                "SELECT id, root_id, identity FROM roots"
            )
        }
        first = {int(runs.first[run]): run for run in chosen}
        rows = {*first, *(int(runs.last[run]) for run in chosen)}
        sql = "SELECT id, name, root FROM blocks WHERE id IN"
        for row, name, root in self._in_chunks(sql, list(rows)):
            self.names[row] = name.hex()
            if row in first:
                self.roots[first[row]] = roots[root]

    def _in_chunks(self, sql: str, values: Sequence[object]) -> Iterator[tuple]:
        for at in range(0, len(values), _CHUNK):
            part = values[at : at + _CHUNK]
            yield from self.store.index.query(f"{sql} ({', '.join('?' * len(part))})", part)


def _architecture(identity: str) -> str:
    if not identity:  # the index has none of sealed blocks
        return SEALED
    try:
        return str(parse_identity(identity).get("architecture", ""))
    except Damaged:
        return ""
