"""State checkpoints where people look: the tree, one block or session in full, and the numbers."""

from __future__ import annotations

import numpy as np

from kvsnap.cli.draw_tree import draw
from kvsnap.formats.codecs import get_codec
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore.inspect import describe_block, describe_session
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tree import Tree, deepest_block, read_tree
from kvsnap.testing.by_hand import (
    LAYOUT,
    ROOT,
    SIZE,
    blocks_of,
    lose,
    packed,
    put,
    put_all,
    state_at,
    touch,
)
from kvsnap.testing.recount import assert_counts
from kvsnap.testing.turns import some_ids

IDS = some_ids(70)
"""Four blocks of 16 and six more."""
OTHER = np.concatenate([IDS[:40], some_ids(30, seed=1)])
"""Parts from it in the third block."""
STATES = (5, 32, 40, 69)


def test_the_tree_counts_blocks_without_states_and_reuse_with_them(store: Store) -> None:
    put(store, *blocks_of(IDS), *blocks_of(OTHER))
    bare = read_tree(store)
    put_all(store, IDS, STATES)
    put_all(store, OTHER, (50,))
    for _ in range(3):
        touch(store, state_at(IDS, 69))
    touch(store, state_at(IDS, 40))
    tree = read_tree(store)
    assert [node.states for node in bare.nodes] == [0, 0, 0]
    first, own, other = tree.nodes
    assert [(n.start, n.tokens, n.blocks) for n in tree.nodes] == [
        (0, 32, 2), (32, 32, 2), (32, 32, 2),
    ]  # fmt: skip
    # 5 stands on no block; 32 and 40 on the second one.
    assert [first.states, own.states, other.states] == [2, 1, 1]
    assert [first.reused, own.reused, other.reused] == [4, 3, 0]
    (size,) = store.index.query("SELECT SUM(bytes) FROM blocks WHERE parent NOTNULL OR state = 0")
    assert sum(node.bytes for node in tree.nodes) == size[0]
    assert own.last_block == blocks_of(IDS)[3].name.hex()
    assert len(list(draw(tree))) == 3


def test_the_tree_of_a_state_is_that_of_the_block_under_it(store: Store) -> None:
    put_all(store, IDS, STATES)
    put_all(store, OTHER, (50,))
    name = state_at(IDS, 69).name
    assert deepest_block(store, None, name.hex()) == name
    tree = read_tree(store, block=name)
    assert [node.on_path for node in tree.nodes if node.last_block in _ends(tree)] == [True, False]
    assert tree.nodes[1].last_block == blocks_of(IDS)[3].name.hex()
    assert read_tree(store, block=state_at(IDS, 5).name) == Tree((), 0)


def _ends(tree: Tree) -> set[str]:
    parents = {node.parent for node in tree.nodes}
    return {node.last_block for node in tree.nodes if node.id not in parents}


def test_a_hold_on_a_state_marks_the_node_under_it(store: Store) -> None:
    put_all(store, IDS, STATES)
    store.pins.pin_block(state_at(IDS, 69).name)
    store.pins.pin_block(state_at(IDS, 5).name)  # on no block: it marks nothing
    (node,) = read_tree(store).nodes
    assert node.pinned
    store.pins.unpin_block(state_at(IDS, 69).name)
    (node,) = read_tree(store).nodes
    assert not node.pinned
    lose(store, state_at(IDS, 40))
    (node,) = read_tree(store).nodes
    assert (node.lost, node.unusable) == (None, 0)


def test_a_block_and_a_state_are_shown_with_their_kind(store: Store) -> None:
    put_all(store, IDS, STATES)
    block, state = blocks_of(IDS)[1], state_at(IDS, 69)
    assert describe_block(store, block.name.hex())["kind"] == "block"
    found = describe_block(store, state.name.hex()[:20])
    assert (found["kind"], found["start"], found["tokens"]) == ("state", 64, 5)
    assert found["parent"] == state.parent.hex()
    store.place.block(state.name).unlink()
    assert describe_block(store, state.name.hex())["kind"] == "state"


def test_a_session_is_shown_with_its_state(store: Store) -> None:
    put_all(store, IDS, STATES)
    state = state_at(IDS, 69)
    record = SessionRecord(
        name="chat",
        tenant_id="default",
        root_id=ROOT.root_id,
        identity=ROOT.identity,
        block_size=SIZE,
        revision=1,
        token_ids=IDS[:69],
        chain=tuple(block.name for block in blocks_of(IDS)),
        state=state.name,
    )
    with store.sessions.draft(record, get_codec("raw"), LAYOUT, {}) as draft:
        assert store.sessions.publish(draft, (0, "")) is not None
    size = store.place.block(state.name).stat().st_size
    shown = describe_session(store, "default", "chat")
    assert shown["state"] == {"name": state.name.hex(), "stored": True, "bytes": size}
    assert len(shown["blocks"]) == 4
    lose(store, state)
    assert describe_session(store, "default", "chat")["state"]["stored"] is False


def test_stats_tell_blocks_and_states_apart_and_sharing_counts_blocks(store: Store) -> None:
    put(store, *blocks_of(IDS), *blocks_of(OTHER))
    bare = stats(store)
    assert (bare.blocks, bare.states) == (6, 0)
    shared = sum(packed(block).size for block in blocks_of(IDS)[:2])
    assert bare.bytes_saved_by_sharing == shared
    put_all(store, IDS, (5, 32, 40, 64, 69))
    put_all(store, OTHER, (17, 50))
    found = stats(store)
    assert (found.blocks, found.states, found.codecs) == (6, 7, {"raw": 6})
    assert found.bytes_saved_by_sharing == shared
    lose(store, state_at(IDS, 64))
    after = stats(store)
    assert (after.blocks, after.states) == (6, 6)
    assert after.bytes_saved_by_sharing == shared
    assert_counts(store)


def test_the_last_block_of_a_session_is_a_chains_end_also_under_a_state(store: Store) -> None:
    put_all(store, IDS, STATES)
    record = SessionRecord(
        name="chat",
        tenant_id="default",
        root_id=ROOT.root_id,
        identity=ROOT.identity,
        block_size=SIZE,
        revision=1,
        token_ids=IDS[:64],
        chain=tuple(block.name for block in blocks_of(IDS)),
    )
    with store.sessions.draft(record, get_codec("raw"), LAYOUT, {}) as draft:
        assert store.sessions.publish(draft, (0, "")) is not None
    assert stats(store).bytes_saved_by_sharing == 0
