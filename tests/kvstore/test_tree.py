"""The tree of shared prefixes: runs of blocks as nodes, reuse summed over what follows, bounded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.cli.draw_tree import draw
from kvsnap.formats.errors import NotFound
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.index import big_endian
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tree import Tree, deepest_block, read_tree
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]
SYSTEM = some_ids(48)


def branch(seed: int, blocks: int = 2) -> list[int]:
    """The system prompt of three blocks, and more that parts with its first token."""
    return [*SYSTEM, seed, *some_ids(blocks * 16 - 1, seed=seed)]


def ask(store: Store, ids: list[int], times: int, name: str | None = None) -> None:
    for _ in range(times):
        turn(store, StampedEngine(), [*ids, 1], name, save=False)
    store.index.write_notes()


def shape(tree: Tree) -> list[tuple[int | None, int, int]]:
    return [(node.parent, node.start, node.blocks) for node in tree.nodes]


def rows(store: Store) -> list[bytes]:
    return [name for (name,) in store.index.query("SELECT name FROM blocks ORDER BY start, id")]


def test_a_chain_without_a_branch_is_one_node(store: Store) -> None:
    turn(store, StampedEngine(), some_ids(70), "chat")
    (node,) = read_tree(store).nodes
    names = rows(store)
    assert (node.start, node.tokens, node.blocks, node.parent) == (0, 64, 4, None)
    assert (node.first_block, node.last_block) == (names[0].hex(), names[3].hex())
    assert node.bytes == store.index.query("SELECT SUM(bytes) FROM blocks")[0][0]
    assert (node.sessions, node.architecture) == (("chat",), "stamped")
    assert (node.pinned, node.leased, node.unusable, node.lost) == (False, False, 0, None)


def test_a_shared_prefix_is_a_node_with_a_branch_for_each_way_on(store: Store) -> None:
    for seed in (1, 2, 3):
        turn(store, StampedEngine(), branch(seed, blocks=seed), f"chat {seed}")
    tree = read_tree(store)
    assert sorted(shape(tree)[1:]) == [(0, 48, 1), (0, 48, 2), (0, 48, 3)]
    assert shape(tree)[0] == (None, 0, 3)
    assert {(node.blocks, *node.sessions) for node in tree.nodes[1:]} == {
        (1, "chat 1"), (2, "chat 2"), (3, "chat 3"),
    }  # fmt: skip
    assert tree.nodes[0].sessions == ()


def test_prompts_that_share_nothing_are_trees_of_their_own(store: Store) -> None:
    turn(store, StampedEngine(), [1, *some_ids(20)])
    turn(store, StampedEngine(), [2, *some_ids(40)])
    assert sorted(shape(read_tree(store))) == [(None, 0, 1), (None, 0, 2)]


def test_a_session_that_ends_inside_a_run_makes_no_branch(store: Store) -> None:
    turn(store, StampedEngine(), branch(1)[:48], "short")
    turn(store, StampedEngine(), branch(1), "long")
    (node,) = read_tree(store).nodes
    assert (node.blocks, node.sessions) == (5, ("long", "short"))


def test_reuse_of_a_node_counts_what_follows_it_and_the_most_reused_comes_first(
    store: Store,
) -> None:
    turn(store, StampedEngine(), branch(1))
    turn(store, StampedEngine(), branch(2))
    before = read_tree(store).nodes[0].reused
    ask(store, branch(1), 2)
    ask(store, branch(2), 5)
    ask(store, SYSTEM.tolist(), 3)
    nodes = read_tree(store).nodes
    assert nodes[0].reused == before + 10
    assert [node.reused for node in nodes[1:]] == [5, 2]
    twos = dict(store.index.query("SELECT hex(name), hits FROM blocks WHERE start = 64"))
    assert twos[nodes[1].last_block.upper()] == 5


def test_eviction_takes_no_reuse_from_the_tree(store: Store) -> None:
    turn(store, StampedEngine(), branch(1))
    turn(store, StampedEngine(), branch(2))
    ask(store, branch(1), 4)
    before = read_tree(store).nodes[0]
    gc(Store(store.path, capacity=store.space.used() - 5000), dry_run=False)
    after = read_tree(store)
    assert sum(node.blocks for node in after.nodes) < 7
    assert after.nodes[0].reused == before.reused >= 4


def test_of_a_session_only_its_own_tree_is_shown_with_its_path_marked(store: Store) -> None:
    for seed in (1, 2):
        turn(store, StampedEngine(), branch(seed), f"chat {seed}")
    turn(store, StampedEngine(), some_ids(40, seed=7), "elsewhere")
    turn(store, StampedEngine(rotation_k=64), branch(1), "other setting")
    tree = read_tree(store, block=deepest_block(store, None, "chat 2"))
    assert len(tree.nodes) == 3
    assert [node.on_path for node in tree.nodes if node.sessions != ("chat 1",)] == [True, True]
    assert [node.on_path for node in tree.nodes if node.sessions == ("chat 1",)] == [False]
    assert tree.omitted == 0
    assert len(read_tree(store).nodes) == 5


def test_of_a_block_the_path_ends_in_the_node_that_it_is_in(store: Store) -> None:
    for seed in (1, 2):
        turn(store, StampedEngine(), branch(seed))
    inside = rows(store)[1]
    block = deepest_block(store, None, inside.hex()[:16])
    assert block == inside
    assert [node.on_path for node in read_tree(store, block=block).nodes] == [True, False, False]


def test_what_is_neither_a_session_nor_a_block_is_not_found(store: Store) -> None:
    turn(store, StampedEngine(), branch(1))
    with pytest.raises(NotFound):
        deepest_block(store, None, "nobody")


def test_another_tenants_session_name_is_not_taken_for_ones_own(store: Store) -> None:
    turn(store, StampedEngine(), branch(1), "chat")
    with pytest.raises(NotFound):
        deepest_block(store, Tenant(bytes(32)), "chat")


def test_a_session_without_a_stored_block_has_no_tree(store: Store) -> None:
    turn(store, StampedEngine(), some_ids(7), "short")
    assert deepest_block(store, None, "short") is None
    assert read_tree(store) == Tree((), 0)
    assert read_tree(store, block=bytes(32)) == Tree((), 0)


def test_a_session_whose_last_blocks_were_evicted_ends_where_it_is_stored(store: Store) -> None:
    turn(store, StampedEngine(), branch(1), "chat")
    used = store.space.used()
    gc(Store(store.path, capacity=used - 3000), dry_run=False)
    left = rows(store)
    assert 0 < len(left) < 5
    assert deepest_block(store, None, "chat") == left[-1]


def test_pins_and_leases_mark_the_node_that_they_stand_in(store: Store) -> None:
    for seed in (1, 2):
        turn(store, StampedEngine(), branch(seed), f"chat {seed}")
    store.pins.pin_session("default", "chat 1")
    with store.holds.lease() as lease:
        lease.keep(rows(store)[0])
        marks = {node.sessions: (node.pinned, node.leased) for node in read_tree(store).nodes}
    assert marks == {
        (): (False, True), ("chat 1",): (True, False), ("chat 2",): (False, False),
    }  # fmt: skip
    assert not any(node.leased for node in read_tree(store).nodes)
    with store.index.transaction() as db:
        db.execute("UPDATE holds SET until = 1")
    assert not any(node.pinned for node in read_tree(store).nodes), "it has expired"


@pytest.mark.parametrize("rebuilt", [False, True])
def test_lost_blocks_and_what_waits_behind_them_are_marked(
    open_store: Opener, store_path: Path, rebuilt: bool
) -> None:
    store = open_store()
    for seed in (1, 2):
        turn(store, StampedEngine(), branch(seed), f"chat {seed}")
    store.place.block(rows(store)[2]).unlink()
    if rebuilt:
        (store_path / "index.sqlite3").unlink()
        store = open_store()
    else:
        turn(store, StampedEngine(), branch(1), save=False)
    nodes = read_tree(store).nodes
    assert [(node.unusable, node.lost) for node in nodes if node.sessions] == [(2, None)] * 2
    (broken,) = (node for node in nodes if node.lost)
    assert (broken.unusable, broken.lost) == (1, "the file is missing")
    path = read_tree(store, block=deepest_block(store, None, "chat 1")).nodes
    assert [node.sessions for node in path if node.on_path][-1] == ("chat 1",)


def test_the_output_is_bounded_and_says_what_was_left_out(store: Store) -> None:
    for seed in range(8):
        turn(store, StampedEngine(), branch(seed), f"chat {seed}")
        ask(store, branch(seed), seed)
    turn(store, StampedEngine(), some_ids(40, seed=9))
    tree = read_tree(store, limit=4)
    assert [node.sessions for node in tree.nodes] == [
        (), ("chat 7",), ("chat 6",), ("chat 5",),
    ]  # fmt: skip
    assert [node.omitted for node in tree.nodes] == [5, 0, 0, 0]
    assert tree.omitted == 1
    of_one = read_tree(store, limit=3, block=deepest_block(store, None, "chat 0"))
    assert [node.sessions for node in of_one.nodes] == [(), ("chat 7",), ("chat 0",)]
    assert of_one.omitted == 0


def _insert(store: Store, chain: int, side_branches: bool) -> None:
    """Rows without files: a chain, and a branch of one block at each of its blocks."""
    turn(store, StampedEngine(), some_ids(16, seed=99))
    tokens = big_endian(some_ids(16))
    insert = (
        "INSERT INTO blocks(id, name, parent, root, start, tokens, length, bytes, codec, used,"
        " reachable) VALUES (?, ?, ?, 1, ?, ?, 16, 1, 'raw', ?, 1)"
    )
    with store.index.transaction() as db:
        for n in range(chain):
            above = 2 * n + 8 if n else None
            name = n.to_bytes(32, "big")
            db.execute(insert, (2 * n + 10, name, above, 16 * n, tokens, n))
            if side_branches and n:
                db.execute(insert, (2 * n + 11, b"s" + name[1:], above, 16 * n, tokens, n))


def test_a_chain_of_many_blocks_is_still_one_node(store: Store) -> None:
    _insert(store, 5000, side_branches=False)
    long, short = sorted(read_tree(store).nodes, key=lambda node: -node.blocks)
    assert (long.blocks, long.tokens, short.blocks) == (5000, 80_000, 1)


def test_branches_nested_thousands_deep_are_read_and_drawn(store: Store) -> None:
    _insert(store, 2500, side_branches=True)
    tree = read_tree(store, limit=10_000)
    assert len(tree.nodes) == 5000
    assert len(list(draw(tree))) == 5000
    last = max(tree.nodes, key=lambda node: node.start)
    few = read_tree(store, limit=10, block=bytes.fromhex(last.last_block))
    assert len(few.nodes) == 10
    assert all(node.on_path for node in few.nodes)


def test_values_that_are_no_numbers_make_the_index_anew(store: Store) -> None:
    turn(store, StampedEngine(), branch(1))
    with store.index.transaction() as db:
        db.execute("UPDATE blocks SET hits = 'many' WHERE start = 16")
    (node,) = read_tree(store).nodes
    assert (node.blocks, node.unusable) == (5, 0)


def test_reading_the_tree_changes_nothing_and_gives_plain_data(store: Store) -> None:
    turn(store, StampedEngine(), branch(1), "chat")
    state = "SELECT * FROM blocks"
    before = store.index.query(state)
    assert json.loads(json.dumps(dataclasses.asdict(read_tree(store))))
    assert store.index.query(state) == before
