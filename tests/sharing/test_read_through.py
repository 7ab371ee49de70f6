"""Read-through: what is missing here is looked for in the remote while what is here is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import NotFound
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import Turn, some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import save_and_push

Machine = Callable[..., Store]
IDS = some_ids(16 * 12 + 5)
MORE = np.concatenate([IDS, some_ids(20, 8)])


@pytest.fixture(autouse=True)
def pushed(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat")


def ask(store: Store, ids: np.ndarray, name: str | None = None) -> tuple[StampedEngine, Turn]:
    """A resumed prompt with every row checked."""
    engine = StampedEngine()
    done = turn(store, engine, ids, name, save=False)
    engine.check_rows()
    return engine, done


def test_a_prompt_takes_its_blocks_from_the_remote(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    engine, done = ask(b, MORE)
    assert engine.positions == list(range(192, 217))
    assert done.resumed.from_store == 192
    b.close()
    assert_clean(machine("b"))


def test_what_came_once_is_not_asked_for_again(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    ask(b, IDS)
    came = remote.bytes_in
    engine, _ = ask(b, IDS)
    assert engine.positions == list(range(192, 197))
    assert remote.bytes_in == came
    engine, _ = ask(machine("b"), IDS)  # without the remote
    assert engine.positions == list(range(192, 197))


def test_local_and_remote_blocks_make_one_chain(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    turn(b, StampedEngine(), IDS[:80])
    got = remote.calls("get")
    engine, _ = ask(b, IDS)
    assert engine.positions == list(range(192, 197))
    assert remote.calls("get") - got == 12 - 5


@pytest.mark.parametrize("held", [100, 197])
def test_an_engine_that_holds_more_than_the_store_asks_nobody(
    machine: Machine, remote: Counted, held: int
) -> None:
    """The blocks before it would have to come first, and be of no use."""
    b = machine("b", remote=remote)
    engine = StampedEngine()
    engine.evaluate(IDS[:held])
    before = remote.counts()
    turn(b, engine, IDS, save=False)
    assert remote.counts() == before
    assert engine.positions[held:] == list(range(min(held, 196), 197))
    engine.check_rows()


def test_a_session_is_found_by_its_name(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    engine, done = ask(b, MORE, "chat")
    assert engine.positions == list(range(197, 217))
    assert done.session.stored_token_ids().tolist() == IDS.tolist()
    assert machine("b").sessions.load("default", "chat").record.revision == 1


def test_a_name_that_nobody_has_is_a_new_session(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    engine, done = ask(b, IDS, "new")
    assert engine.positions == list(range(192, 197))
    with pytest.raises(NotFound):
        done.session.stored_token_ids()


def test_another_prompt_of_the_chain_shares_its_front(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    branch = np.concatenate([IDS[:100], some_ids(50, 9)])
    engine, _ = ask(b, branch)
    assert engine.positions == list(range(96, 150))


def test_few_questions_find_the_end(machine: Machine, remote: Counted) -> None:
    b, asked = machine("b", remote=remote), remote.calls("size")
    ask(b, IDS)
    assert remote.calls("size") - asked <= 8


def test_two_engines_read_through_at_once(machine: Machine, remote: Counted) -> None:
    b, found, errors = machine("b", remote=remote), [], []

    def work() -> None:
        try:
            found.append(ask(b, IDS)[0].positions)
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == [list(range(192, 197))] * 4
    b.close()
    assert_clean(machine("b"))


def test_two_workers_start_with_one_session(machine: Machine, remote: Counted) -> None:
    second, nested = machine("b", remote=remote), [False]

    def start_too(operation: str, key: str) -> None:
        if key.startswith("blocks/") and not nested[0]:
            nested[0] = True
            assert ask(second, MORE, "chat")[0].positions == list(range(197, 217))

    first = machine("b", remote=Hooked(remote, start_too))
    engine, done = ask(first, MORE, "chat")
    assert engine.positions == list(range(197, 217))
    assert done.resumed.damage == ()


def test_models_with_states_resume_pulled_sessions_by_name(
    machine: Machine, remote: Counted
) -> None:
    a, b = machine("a2"), machine("b", remote=remote)
    engine = StampedEngine(recurrent=64)
    turn(a, engine, IDS, "stateful")
    push(a, remote, "default", "stateful")
    engine = StampedEngine(recurrent=64)
    turn(b, engine, MORE, "stateful", save=False)
    assert engine.positions == list(range(197, 217))
    engine.check_rows()


def test_a_lossy_session_reads_its_own_chain_through(machine: Machine, remote: Counted) -> None:
    ids = some_ids(197, 11)
    save_and_push(machine("a"), remote, ids, "lossy", codec="q8")
    engine = StampedEngine()
    done = turn(machine("b", remote=remote), engine, ids, codec="q8", save=False)
    assert engine.positions == list(range(192, 197))
    assert done.resumed.fidelity.startswith("q8")
    engine, _ = ask(machine("c", remote=remote), ids)
    assert engine.positions == list(range(197))


def test_a_session_opened_twice_is_pulled_once(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote)
    Session(b, StampedEngine(), "chat")
    got = remote.calls("get")
    Session(b, StampedEngine(), "chat")
    assert remote.calls("get") == got


def test_with_a_tier_in_memory_the_rows_are_the_same(machine: Machine, remote: Counted) -> None:
    b = machine("b", remote=remote, ram="10MB")
    for _ in range(3):
        engine, _ = ask(b, IDS)
        assert engine.positions == list(range(192, 197))


def test_a_store_may_be_closed_while_blocks_are_on_their_way(
    machine: Machine, remote: Counted, tmp_path: Path
) -> None:
    """The resume was over early: a block that is here turned out damaged."""
    b = machine("b")
    turn(b, StampedEngine(), IDS[:80])
    b.close()
    victim = b.place.block(b.index.query("SELECT name FROM blocks WHERE start = 0")[0][0])
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")

    def slow(operation: str, key: str) -> None:
        time.sleep(0.02)

    with Store(tmp_path / "b", remote=Hooked(remote, slow)) as store:
        engine, _ = ask(store, IDS)
    assert engine.positions[0] in (0, 192)
    again = machine("b")
    engine, _ = ask(again, IDS)
    assert_clean(again)
