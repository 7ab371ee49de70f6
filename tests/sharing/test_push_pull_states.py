"""Models that go on from state checkpoints only: the checkpoints move with the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import PartlyDone
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import ME

Machine = Callable[..., Store]
IDS = some_ids(75)
SYSTEM = 41
KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": 24},
    "recurrent": {"recurrent": 64},
    "both": {"window": 24, "recurrent": 64},
    "recurrent only": {"recurrent": 64, "full": False},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def save_with_system_prompt(store: Store, kind: dict[str, Any]) -> None:
    """A checkpoint after the system prompt, and one at the end."""
    engine = StampedEngine(**kind)
    session = Session(store, engine, "chat")
    session.resume(IDS)
    engine.evaluate(IDS[:SYSTEM])
    session.checkpoint()
    engine.evaluate(IDS[SYSTEM:])
    session.save()


def positions(store: Store, kind: dict[str, Any], ids: np.ndarray, name: str | None) -> list[int]:
    engine = StampedEngine(**kind)
    turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine.positions


def pulled(machine: Machine, remote: Counted, kind: dict[str, Any]) -> tuple[Store, Store]:
    """Two machines: the second has what the first saved and pushed."""
    a, b = machine("a"), machine("b")
    save_with_system_prompt(a, kind)
    push(a, remote, ME, "chat")
    pull(b, remote, "chat")
    return a, b


def test_a_pulled_session_goes_on_where_it_ended(
    machine: Machine, remote: Counted, kind: dict[str, Any]
) -> None:
    _, b = pulled(machine, remote, kind)
    assert_clean(b)
    more = np.concatenate([IDS, some_ids(10, 5)])
    assert positions(b, kind, more, "chat") == list(range(75, 85))


def test_another_chat_branches_after_the_system_prompt(
    machine: Machine, remote: Counted, kind: dict[str, Any]
) -> None:
    _, b = pulled(machine, remote, kind)
    other = np.concatenate([IDS[:SYSTEM], some_ids(20, 6)])
    assert positions(b, kind, other, None) == list(range(SYSTEM, SYSTEM + 20))


def test_a_branch_moves_no_checkpoint_twice(
    machine: Machine, remote: Counted, kind: dict[str, Any]
) -> None:
    a, b = pulled(machine, remote, kind)
    other = np.concatenate([IDS[:SYSTEM], some_ids(20, 6)])
    turn(a, StampedEngine(**kind), other, "branch")
    report = push(a, remote, ME, "branch")
    # The session's file, the checkpoint at its end, and the blocks beyond the first two.
    assert report.moved_files == 2 + (61 // 16 - SYSTEM // 16)
    assert pull(b, remote, "branch").moved_files == report.moved_files - 1
    more = np.concatenate([other, some_ids(5, 7)])
    assert positions(b, kind, more, "branch") == list(range(61, 66))


def test_a_checkpoint_that_is_missing_there_costs_only_itself(
    machine: Machine, remote: Counted, kind: dict[str, Any]
) -> None:
    a, b = machine("a"), machine("b")
    save_with_system_prompt(a, kind)
    push(a, remote, ME, "chat")
    ((name,),) = a.index.query(
        "SELECT name FROM blocks WHERE state = 1 ORDER BY start DESC LIMIT 1"
    )
    remote.delete(f"blocks/{name.hex()[:2]}/{name.hex()}.safetensors")
    with pytest.raises(PartlyDone, match="state"):
        pull(b, remote, "chat")
    assert positions(b, kind, IDS, "chat") == list(range(SYSTEM, 75))
    assert_clean(b)
