"""With a key: what is stored under it, all of it and nothing else. Without one: all, for whoever runs the
store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.formats.errors import NotFound, Sealed, UsageError
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.inspect import describe_block, find_pinnable
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.tree import Tree, deepest_block, read_tree
from kvsnap.kvstore.verify import verify_store
from kvsnap.kvstore.whose_blocks import own_roots
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.tenants import ALICE, BOB, open_shared

IDS, OTHER = some_ids(70, 1), some_ids(40, 2)
OF_ALL = ("requests", "reused_tokens", "computed_tokens", "evicted_blocks")
CAROL = Tenant(bytes(range(100, 132)))


def fill(store: Store, tenant: Tenant | None) -> None:
    """Two sessions that share two blocks, one of them pinned, and blocks of another model without one."""
    turn(store, StampedEngine(), IDS, "long", tenant=tenant)
    turn(store, StampedEngine(), [*IDS[:35], 7], "short", tenant=tenant)
    turn(store, StampedEngine(weights="other", recurrent=16), OTHER, tenant=tenant)
    store.pins.pin_session(tenant_id(tenant), "long")


@pytest.fixture(params=["sealed", "plain"])
def alone(request: Any, tmp_path: Path) -> Iterator[Store]:
    """Alice's store, with nobody else in it."""
    with open_shared(tmp_path / "alone", encrypt=request.param == "sealed") as store:
        fill(store, ALICE)
        yield store


@pytest.fixture
def shared(alone: Store, tmp_path: Path) -> Iterator[Callable[[], Store]]:
    """The same with Bob's things or, in the clear, nobody's in it; opened anew at each call."""
    path, opened = tmp_path / "shared", list[Store]()

    def open_it() -> Store:
        opened.append(open_shared(path, encrypt=alone.encrypt))
        return opened[-1]

    store = open_it()
    fill(store, ALICE)
    other = BOB if alone.encrypt else None
    for seed in (3, 4):
        turn(store, StampedEngine(), some_ids(100, seed), f"other {seed}", tenant=other)
    turn(store, StampedEngine(), IDS, "long", tenant=other)
    store.pins.pin_session(tenant_id(other), "long")
    yield open_it
    for store in opened:
        store.close()


def chain(shared: Callable[[], Store], who: Tenant | None) -> tuple[bytes, ...]:
    """The names of the blocks of "long"."""
    store = shared()
    store.keys.add(who)
    return store.sessions.load(tenant_id(who), "long").record.chain


def rebuild(store: Store) -> None:
    store.close()
    for path in store.path.glob("index.sqlite3*"):
        path.unlink()


@pytest.mark.parametrize("rebuilt", [False, True])
def test_the_numbers_are_those_of_a_store_of_ones_own(
    alone: Store, shared: Callable[[], Store], rebuilt: bool
) -> None:
    if rebuilt:
        rebuild(shared())
    here, there = stats(alone, ALICE), stats(shared(), ALICE)
    assert there == here
    all_of_it = dataclasses.asdict(stats(alone))
    for name, value in dataclasses.asdict(here).items():
        assert value == (None if name in OF_ALL else all_of_it[name]), name
    assert (here.blocks, here.states, here.sessions, here.pinned) == (6, 1, 2, 1)
    assert stats(shared()).blocks > here.blocks
    assert stats(shared(), CAROL).blocks == stats(shared(), CAROL).bytes == 0


def test_the_list_is_that_of_a_store_of_ones_own(alone: Store, shared: Callable[[], Store]) -> None:
    lists = []
    for store in (alone, shared()):
        store.keys.add(ALICE)
        listed = [
            (e.facts, e.stored_blocks, e.pinned_until) for e in store.listing.of(ALICE.tenant_id)
        ]
        lists.append(listed)
    assert lists[0] == lists[1]
    assert sorted(facts.name for facts, *_ in lists[0]) == ["long", "short"]
    everything = list(shared().listing)
    assert len(everything) == 5
    assert not list(shared().listing.of(CAROL.tenant_id))


def test_a_symbolic_link_in_the_place_of_a_tenants_folder_is_not_followed(
    alone: Store, tmp_path: Path
) -> None:
    folder = alone.place.sessions / ALICE.tenant_id
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert not list(alone.listing.of(ALICE.tenant_id))
    assert not list(alone.listing)


def test_the_trees_are_those_of_a_store_of_ones_own(
    alone: Store, shared: Callable[[], Store]
) -> None:
    here, there = read_tree(alone, tenant=ALICE), read_tree(shared(), tenant=ALICE)
    assert there == here
    assert {name for node in here.nodes for name in node.sessions} == {"long", "short"}
    assert len(read_tree(shared()).nodes) > len(here.nodes)
    assert read_tree(shared(), tenant=CAROL) == Tree((), 0)


def test_verify_finds_ones_own_damage_only(shared: Callable[[], Store]) -> None:
    store = shared()
    own, other = (chain(shared, who)[-1] for who in (ALICE, BOB if store.encrypt else None))
    for name in (own, other):
        path = store.place.block(name)
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    found = verify_store(shared(), ALICE)
    assert [bad.name for bad in found.bad] == [own.hex()]
    assert (found.checked, found.sealed) == (7 + 2, 0)
    everything = verify_store(shared())
    assert {bad.name for bad in everything.bad} == {own.hex(), other.hex()}
    assert everything.checked > found.checked
    assert verify_store(shared(), CAROL).checked == 0


def test_a_block_of_anothers_is_no_block(shared: Callable[[], Store]) -> None:
    store, nobodys = shared(), "0123456789ab"
    own, other = (chain(shared, who)[1].hex() for who in (ALICE, BOB if store.encrypt else None))
    looks: list[Callable[[str], Any]] = [
        lambda name: describe_block(store, name, ALICE)["block"],
        lambda name: find_pinnable(store, ALICE, name).hex(),  # type: ignore[union-attr]
        lambda name: (deepest_block(store, ALICE, name) or b"").hex(),
    ]
    for look in looks:
        assert look(own[:12]) == own
        told = []
        for name in (other[:12], nobodys):
            with pytest.raises(NotFound) as refused:
                look(name)
            told.append(f"{refused.value.what} {refused.value.hint}".replace(name, "NAME"))
        assert told[0] == told[1]
    assert describe_block(store, own, ALICE)["token_ids"] == IDS[16:32].tolist()


def test_a_name_that_begins_like_anothers_is_not_ambiguous(shared: Callable[[], Store]) -> None:
    """That there are several would tell of the other one."""
    store, own = shared(), chain(shared, ALICE)[1]
    others = "SELECT MAX(id) FROM blocks WHERE root NOT IN (SELECT root FROM blocks WHERE name = ?)"
    with store.index.transaction() as db:
        clash = own[:8] + bytes(24)
        db.execute(f"UPDATE blocks SET name = ? WHERE id = ({others})", (clash, own))
    assert find_pinnable(store, ALICE, own.hex()[:16]) == own
    with pytest.raises(UsageError, match="several"):
        find_pinnable(store, None, own.hex()[:16])


def test_without_the_key_a_sealed_block_is_not_opened(shared: Callable[[], Store]) -> None:
    store, own = shared(), chain(shared, ALICE)[1].hex()
    if store.encrypt:
        with pytest.raises(Sealed):
            describe_block(store, own)
    else:
        assert describe_block(store, own)["token_ids"] == IDS[16:32].tolist()


def test_roots_of_a_key_are_found_whatever_the_index_says(shared: Callable[[], Store]) -> None:
    store = shared()
    assert own_roots(store, None) is None
    before = own_roots(store, ALICE)
    assert before is not None
    assert len(before) == 2
    with store.index.transaction() as db:
        for identity in ("", "{", "é", b"\xff", 3):
            sql = "INSERT INTO roots(root_id, identity) VALUES (?, ?)"
            db.execute(sql, (repr(identity), identity))
    assert own_roots(store, ALICE) == before
