"""Read-through: what is missing here is looked for in the remote while what is here is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.errors import Damaged, NotFound, RemoteDenied, RemoteDown
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import Turn, some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import block_files, only, save_and_push

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


@pytest.mark.parametrize("error", [RemoteDown, RemoteDenied])
def test_a_remote_that_fails_costs_one_question_and_says_so(
    machine: Machine, remote: Counted, error: type[Exception]
) -> None:
    asked: list[str] = []

    def fail(operation: str, key: str) -> None:
        asked.append(operation)
        assert len(asked) < 200, "it asks without end"
        raise error("no such luck")

    b = machine("b", remote=Hooked(remote, fail))
    for _ in range(20):
        engine, done = ask(b, IDS)
        assert engine.positions == list(range(197))
        assert any("no such luck" in line for line in done.resumed.damage)
    assert len(asked) <= (1 if error is RemoteDown else 20)


def test_a_remote_that_hangs_costs_one_timeout_in_twenty_resumes(
    machine: Machine, remote: Counted
) -> None:
    """A53: HEAD answers, GET hangs until its time is over."""
    hung: list[str] = []

    def hang(operation: str, key: str) -> None:
        if operation == "get":
            hung.append(key)
            assert len(hung) < 200
            raise RemoteDown("no answer within 0.2 s")

    b = machine("b", remote=Hooked(remote, hang))
    reports = [ask(b, IDS)[1].resumed for _ in range(20)]
    assert [report.reused_tokens for report in reports] == [0] * 20
    assert any("no answer within 0.2 s" in line for line in reports[0].damage)
    assert len(hung) <= 16, "one round of gets at once"


def test_local_blocks_are_used_where_the_remote_hangs(machine: Machine, remote: Counted) -> None:
    def hang(operation: str, key: str) -> None:
        if operation == "get":
            raise RemoteDown("no answer")

    b = machine("b", remote=Hooked(remote, hang))
    turn(b, StampedEngine(), IDS[:80])
    engine, _ = ask(b, IDS)
    assert engine.positions == list(range(80, 197))


def test_what_a_listing_promises_and_nobody_has_is_no_hit(
    machine: Machine, remote: Counted, there: Path
) -> None:
    """A52: the object is gone, its size is still told; two lookups, one question each."""
    gone = block_files(there)[2]
    key = str(gone.relative_to(there))
    size = gone.stat().st_size
    gone.unlink()

    class Remembers(Hooked):
        def size(self, asked: str) -> int | None:
            return size if asked == key else super().size(asked)

    got: list[str] = []

    def note(operation: str, asked: str) -> None:
        if operation == "get" and asked == key:
            got.append(asked)
            assert len(got) < 50

    b = machine("b", remote=Remembers(remote, note))
    for _ in range(2):
        engine, _ = ask(b, IDS)
        assert engine.positions == list(range(32, 197))
    assert len(got) == 1


def test_a_passing_failure_does_not_change_what_is_known(machine: Machine, remote: Counted) -> None:
    """A52, the other half: 503 is no 404."""
    fails = [True]

    def fail(operation: str, key: str) -> None:
        if operation == "get" and fails[0]:
            raise RemoteDown("503")

    hooked = Hooked(remote, fail)
    ask(machine("b", remote=hooked), IDS)
    fails[0] = False
    engine, _ = ask(machine("b", remote=hooked), IDS)  # another process, with no memory of it
    assert engine.positions == list(range(192, 197))


@pytest.mark.parametrize("kind", ["flipped", "cut", "empty", "another", "far too long", "a link"])
def test_a_damaged_block_there_is_asked_for_once(
    machine: Machine, remote: Counted, there: Path, kind: str
) -> None:
    files = block_files(there)
    path, other = files[5], files[6]
    data = path.read_bytes()
    path.unlink()
    if kind == "a link":
        path.symlink_to(other)
    else:
        changed = {
            "flipped": data[:-1] + bytes([data[-1] ^ 1]),
            "cut": data[:-1],
            "empty": b"",
            "another": other.read_bytes(),
            "far too long": data,
        }
        path.write_bytes(changed[kind])
    if kind == "far too long":
        os.truncate(path, 2**33)
    asked: list[str] = []

    def note(operation: str, key: str) -> None:
        asked.append(key)
        assert len(asked) < 300, "it asks without end"

    b = machine("b", remote=Hooked(remote, note))
    for _ in range(3):
        engine, done = ask(b, IDS)
        assert engine.positions == list(range(80, 197))
        assert done.resumed.damage
    gets = [key for key in asked if key == str(path.relative_to(there))]
    assert len(gets) <= 3
    b.close()
    assert_clean(machine("b"))


def test_an_object_that_may_not_be_read_is_no_endless_loop(
    machine: Machine, remote: Counted
) -> None:
    asked: list[str] = []

    def deny(operation: str, key: str) -> None:
        asked.append(key)
        assert len(asked) < 300, "it asks without end"
        if operation == "get" and key.startswith("blocks/"):
            raise RemoteDenied("403")

    b = machine("b", remote=Hooked(remote, deny))
    engine, done = ask(b, IDS)
    assert engine.positions == list(range(197))
    assert any("403" in line for line in done.resumed.damage)


@pytest.mark.parametrize("folder", ["manifests", "sessions"])
def test_a_session_that_is_damaged_there_starts_anew(
    machine: Machine, remote: Counted, there: Path, folder: str
) -> None:
    path = only(there, folder)
    path.write_bytes(path.read_bytes()[:-1])
    b = machine("b", remote=remote)
    engine, done = ask(b, IDS, "chat")
    assert engine.positions == list(range(192, 197))
    assert any("cannot be used" in line or "damaged" in line for line in done.resumed.damage)
    done.session.save()


def test_a_session_of_other_block_sizes_there_starts_anew(
    machine: Machine, remote: Counted
) -> None:
    b = machine("b", block_size=32, remote=remote)
    engine, done = ask(b, IDS, "chat")
    assert engine.positions == list(range(197))
    assert done.resumed.damage
    done.session.save()


def test_a_store_that_cannot_be_written_still_works(machine: Machine, remote: Counted) -> None:
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    path = machine("b").path
    path.chmod(0o500)
    try:
        engine, _ = ask(machine("b", remote=remote), IDS, "chat")
        assert engine.positions
    finally:
        path.chmod(0o700)


def test_a_full_store_takes_what_fits_and_computes_the_rest(
    machine: Machine, remote: Counted
) -> None:
    b = machine("b", capacity=6 * 3500, min_free="0", remote=remote)
    engine, _ = ask(b, IDS)
    assert 16 < engine.positions[0] < 192
    b.close()
    assert_clean(machine("b"))


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


def test_damage_is_an_answer_and_no_error(machine: Machine, remote: Counted, there: Path) -> None:
    """Whatever stands in the remote, resuming works."""
    for path in there.rglob("*.safetensors"):
        path.write_bytes(b"\0" * 100)
    b = machine("b", remote=remote)
    for name in (None, "chat"):
        engine, _ = ask(b, IDS, name)
        assert engine.positions == list(range(197))
    with pytest.raises(Damaged):
        b.find_session("chat", None)
