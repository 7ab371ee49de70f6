"""trust add, rm and --vouch: whom a store believes, and what becomes of what is stored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import NotFound, UsageError
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add, remove
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import (
    block_of,
    chain_files,
    other_rows,
    session_with_other_tail,
    unsigned,
    with_header,
)
from tests.signers import STRANGER, Signers

IDS = some_ids(57)
OTHERS = some_ids(40, 9)
A, B = "ab" * 32, "cd" * 32
Opener = Callable[..., Store]


@pytest.fixture
def opened(store_path: Path) -> Iterator[Opener]:
    stores: list[Store] = []

    def open_it(**options: object) -> Store:
        stores.append(Store(store_path, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def listed(store: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((store / "kvsnap.json").read_text()).get("trust", {})
    return found


def signers(store: Store) -> set[str]:
    return {block_of(path.read_bytes()).signer for path in chain_files(store.path)}


def computed(store: Store, ids: np.ndarray = IDS, name: str | None = None) -> list[int]:
    engine = StampedEngine()
    turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine.positions


def test_a_list_begins_with_the_first_key_and_ends_with_the_last(
    opened: Opener, store_path: Path
) -> None:
    assert opened().trust is None
    done = add(opened(), A.upper(), "build server")
    assert (done.key, done.name) == (A, "build server")
    add(opened(), B)
    assert listed(store_path) == {A: "build server", B: ""}
    store = opened()
    assert store.trust is not None
    assert store.trust.listed == {A: "build server", B: ""}
    settings = json.loads((store_path / "kvsnap.json").read_text())
    assert (settings["block_size"], settings["created"]) == (16, 1), "the rest is kept"
    remove(opened(), "build server")
    assert listed(store_path) == {B: ""}
    remove(opened(), B)
    assert listed(store_path) == {}
    assert opened().trust is None


def test_a_key_that_is_added_again_is_renamed(opened: Opener, store_path: Path) -> None:
    add(opened(), A, "one")
    add(opened(), A, "two")
    assert listed(store_path) == {A: "two"}


def test_what_cannot_be_listed_or_is_not_is_said(opened: Opener, store_path: Path) -> None:
    for key in ("", "ab", "zz" * 32, f"{A}{A}"):
        with pytest.raises(UsageError, match="64 hexadecimal"):
            add(opened(), key)
    for name in ("x" * 201, "two\nlines", "\x1b[31mred"):
        with pytest.raises(UsageError, match="name"):
            add(opened(), A, name)
    assert listed(store_path) == {}
    add(opened(), A, "twin")
    add(opened(), B, "twin")
    with pytest.raises(NotFound, match="several keys are listed as 'twin'"):
        remove(opened(), "twin")
    with pytest.raises(NotFound, match="no key is listed as 'nobody'"):
        remove(opened(), "nobody")
    remove(opened(), A)
    assert listed(store_path) == {B: "twin"}


def test_without_vouching_what_nobody_signed_is_set_aside_and_computed_again(
    opened: Opener, store_path: Path
) -> None:
    turn(opened(), StampedEngine(), IDS, "chat")
    seen: list[tuple[int, int]] = []
    done = add(opened(), A, progress=lambda done, total: seen.append((done, total)))
    assert (done.vouched, done.set_aside, done.sessions) == (0, 3, 0)
    assert seen[-1] == (3, 3)
    assert chain_files(store_path) == []
    reasons = [path.read_text() for path in (store_path / "quarantine").glob("*.reason")]
    assert len(reasons) == 3
    assert all("no trusted key signed it" in reason for reason in reasons)
    store = opened()
    assert store.sessions.load("default", "chat").record.token_ids.tolist() == IDS.tolist()
    assert computed(store, name="chat") == list(range(57))
    turn(store, StampedEngine(), IDS, "chat")
    assert signers(store) == {require_signing_key().public}
    assert_saved(store, IDS, "chat")
    assert_clean(store)


def test_vouching_keeps_blocks_states_and_sessions(opened: Opener, store_path: Path) -> None:
    kinds: list[dict] = [{}, {"window": 20, "recurrent": 24}]
    store = opened()
    for number, kind in enumerate(kinds):
        turn(store, StampedEngine(**kind), IDS, f"chat {number}")
    turn(store, StampedEngine(), OTHERS, "lossy", codec="q8")
    before = {p.name: block_of(p.read_bytes()).content for p in chain_files(store_path)}
    done = add(opened(), A, vouch=True)
    assert (done.vouched, done.set_aside, done.sessions) == (9, 0, 3)
    after = {p.name: block_of(p.read_bytes()) for p in chain_files(store_path)}
    assert {name: block.content for name, block in after.items()} == before
    assert all(block.signed for block in after.values())
    store = opened()
    assert_clean(store)
    assert signers(store) == {require_signing_key().public}
    for number, kind in enumerate(kinds):
        engine = StampedEngine(**kind)
        session = Session(store, engine, f"chat {number}")
        assert session.resume([*IDS, 7]).reused_tokens == 57
        engine.check_rows()
        assert session.stored is not None
        assert session.stored.record.revision == 2, "signed as its next revision"
        assert session.stored.signed
    again = add(opened(), B, vouch=True)
    assert (again.vouched, again.set_aside, again.sessions) == (0, 0, 0)


def test_vouching_signs_no_damaged_file(opened: Opener, store_path: Path) -> None:
    store = opened()
    turn(store, StampedEngine(), IDS, "chat")
    turn(store, StampedEngine(), OTHERS, "other")
    first, second, third = (
        store.place.block(name) for name in store.sessions.load("default", "chat").record.chain
    )
    flip(second, -1)
    broken = store.sessions.path("default", "other")
    flip(broken, 100)
    store.close()
    done = add(opened(), A, vouch=True)
    assert (done.vouched, done.set_aside, done.sessions) == (4, 0, 1)
    assert block_of(first.read_bytes()).signed
    assert not second.exists()
    store = opened()
    assert {bad.path for bad in verify_store(store).bad} == {str(second), str(broken)}
    assert computed(store) == list(range(16, 57))
    turn(store, StampedEngine(), IDS, "chat")
    assert third.exists(), "signed too, and back with the block before it"
    assert computed(store) == list(range(48, 57))


def test_vouching_compares_rows_with_their_digest(opened: Opener, store_path: Path) -> None:
    """A file whose digest was made to fit, but not that of its rows, is damage and gets no signature."""
    store = opened()
    turn(store, StampedEngine(), IDS, "chat")
    path = chain_files(store_path)[1]
    told = block_of(path.read_bytes()).content
    path.write_bytes(with_header(other_rows(path.read_bytes()), content=told))
    store.close()
    done = add(opened(), A, vouch=True)
    assert done.vouched == 2
    assert not path.exists()


def test_a_damaged_tail_gets_no_signature(opened: Opener, store_path: Path) -> None:
    store = opened()
    turn(store, StampedEngine(), IDS, "chat")
    path = store.sessions.path("default", "chat")
    flip(path, -1)
    store.close()
    assert add(opened(), A, vouch=True).sessions == 0
    assert computed(opened(), name="chat") == list(range(48, 57))


def test_300_blocks_are_vouched_for(opened: Opener, store_path: Path) -> None:
    ids = some_ids(300 * 16)
    store = opened()
    turn(store, StampedEngine(capacity=5000), ids, "long", codec="raw")
    for number in range(10):  # a tree, not one chain
        branch = np.concatenate([ids[: 16 * number * 29], some_ids(16, 100 + number)])
        turn(store, StampedEngine(capacity=5000), branch, f"branch {number}", codec="raw")
    store.close()
    seen: list[tuple[int, int]] = []
    done = add(opened(), A, vouch=True, progress=lambda done, total: seen.append((done, total)))
    assert (done.vouched, done.sessions, done.set_aside) == (310, 11, 0)
    assert seen[309] == (310, 310)
    store = opened()
    assert signers(store) == {require_signing_key().public}
    total = sum(path.stat().st_size for path in chain_files(store_path))
    ((counted,),) = store.index.query("SELECT SUM(bytes) FROM totals")
    assert counted == total
    assert_clean(store)
    remove(opened(), A)
    add(opened(), B)
    assert len(chain_files(store_path)) == 310, "this machine's own stay"


def test_300_unsigned_blocks_are_set_aside(opened: Opener, store_path: Path) -> None:
    store = opened()
    turn(store, StampedEngine(capacity=5000), some_ids(300 * 16), "long", codec="raw")
    store.close()
    assert add(opened(), A).set_aside == 300
    store = opened()
    assert chain_files(store_path) == []
    assert store.index.query("SELECT COUNT(*) FROM blocks WHERE lost IS NULL") == [(0,)]
    ((counted,),) = store.index.query("SELECT COALESCE(SUM(bytes), 0) FROM totals")
    assert counted == 0


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_key_that_is_removed_takes_its_blocks_along(
    opened: Opener, store_path: Path, tmp_path: Path, rebuilt: bool
) -> None:
    """Two machines wrote to one folder; one of them is believed no more."""
    keys = Signers(tmp_path)
    for name in ("a", "b"):
        add(opened(), keys.public(name), name)
    front = IDS[:32]
    for name, ids in (("a", front), ("b", IDS)):
        with keys.machine(name):
            turn(opened(), StampedEngine(), ids, f"of {name}")
    assert signers(opened()) == {keys.public("a"), keys.public("b")}
    if rebuilt:
        for path in store_path.glob("index.sqlite3*"):
            path.unlink()
    done = remove(opened(), "b")
    assert (done.key, done.name, done.set_aside) == (keys.public("b"), "b", 1)
    assert signers(opened()) == {keys.public("a")}
    assert computed(opened()) == list(range(32, 57))
    assert computed(opened(), name="of b") == list(range(32, 57)), "its tail is not used either"
    add(opened(), keys.public("b"), "b")
    done = remove(opened(), "a")
    assert done.set_aside == 2
    assert computed(opened()) == list(range(57))


def test_keys_from_outside_stand_in_place_of_the_list(
    opened: Opener, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(opened(), A, "listed")
    monkeypatch.setenv("KVSNAP_TRUST", f" {B.upper()} ,,{STRANGER.public}")
    store = opened(trust=["ef" * 32])
    assert store.trust is not None
    assert store.trust.listed == {B: "", STRANGER.public: "", "ef" * 32: ""}
    assert listed(store_path) == {A: "listed"}, "they are not written down"
    for change in (add, remove):
        with pytest.raises(UsageError, match="given from outside"):
            change(store, A)
    monkeypatch.setenv("KVSNAP_TRUST", " , ")
    remove(opened(), A)
    assert opened().trust is None
    for wrong in ("ab", f"{A};{B}"):
        monkeypatch.setenv("KVSNAP_TRUST", wrong)
        with pytest.raises(UsageError, match="64 hexadecimal"):
            opened()
        monkeypatch.delenv("KVSNAP_TRUST")
        with pytest.raises(UsageError, match="64 hexadecimal"):
            opened(trust=[wrong])


def test_a_list_from_outside_protects_from_one_that_was_written_into_the_store(
    opened: Opener, store_path: Path
) -> None:
    with opened() as store:
        turn(store, StampedEngine(), IDS, "chat")
    for path in chain_files(store_path):
        path.write_bytes(unsigned(path.read_bytes(), b""))
    engine = StampedEngine()
    turn(opened(trust=[A]), engine, IDS, "chat", save=False)
    assert engine.positions == list(range(57))
    engine.check_rows()


def test_a_session_with_other_tail_rows_is_not_vouched_for_twice(
    opened: Opener, store_path: Path
) -> None:
    """Vouching signs what is there: that is what a person says with it. It does not once a list is."""
    turn(opened(), StampedEngine(), IDS, "chat")
    add(opened(), A, vouch=True)
    path = opened().sessions.path("default", "chat")
    path.write_bytes(session_with_other_tail(path.read_bytes(), STRANGER))
    assert computed(opened(), name="chat") == list(range(48, 57))


def test_pins_and_sizes_survive_vouching(opened: Opener, store_path: Path) -> None:
    store = opened()
    turn(store, StampedEngine(), IDS, "chat")
    store.pins.pin_session("default", "chat")
    add(opened(), A, vouch=True)
    store = opened()
    assert_clean(store)
    ((held,),) = store.index.query("SELECT COUNT(*) FROM holds WHERE kind = 'pin'")
    assert held == 1
    assert_saved(store, IDS, "chat")
