"""A name that two token sequences share is caught: the file's own ids are compared, id by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvsnap.formats import names
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Opener = Callable[[], Store]


@pytest.fixture
def weak_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block at one place of a chain gets one name, whatever its ids are."""

    def weak(key: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        parent = bytes(parts[0])
        return bytes([parent[0] + 1]) + bytes(31)

    monkeypatch.setattr(names, "keyed_hash", weak)


@pytest.mark.usefixtures("weak_hash")
@pytest.mark.parametrize("same", [0, 1, 15, 16, 31, 32, 47])
def test_a_collision_reuses_nothing_beyond_the_ids_that_are_equal(
    open_store: Opener, same: int
) -> None:
    ids = some_ids(48)
    saved = turn(open_store(), StampedEngine(), ids).saved
    assert saved is not None
    assert saved.blocks_written == 3
    other = [*ids[:same], ids[same] ^ 1, *some_ids(60 - same, seed=2)]
    engine = StampedEngine()
    done = turn(open_store(), engine, other, save=False).resumed
    engine.check_rows()
    assert engine.held == len(other)
    assert done.reused_tokens <= same
    assert done.reused_tokens >= same // 16 * 16
    assert any("collision" in line for line in done.damage)


@pytest.mark.usefixtures("weak_hash")
def test_a_collision_says_nothing_against_the_file(open_store: Opener) -> None:
    """It stands under its rightful name: it is not set aside, and its owner still hits."""
    ids = some_ids(48)
    turn(open_store(), StampedEngine(), ids)
    turn(open_store(), StampedEngine(), some_ids(48, seed=2), save=False)
    engine = StampedEngine()
    turn(open_store(), engine, ids, save=False)
    assert engine.positions == [47]
    assert not list(open_store().place.quarantine.glob("*"))


@pytest.mark.usefixtures("weak_hash")
def test_saving_after_a_collision_serves_nobody_wrong_rows(open_store: Opener) -> None:
    one, other = some_ids(48), some_ids(48, seed=2)
    turn(open_store(), StampedEngine(), one, "one")
    turn(open_store(), StampedEngine(), other, "other")
    for ids, name in ((one, "one"), (other, "other"), (one, None), (other, None)):
        engine = StampedEngine()
        turn(open_store(), engine, ids, name, save=False)
        assert engine.held == 48
        engine.check_rows()
