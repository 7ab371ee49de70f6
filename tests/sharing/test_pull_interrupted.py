"""A pull that ends early, for whatever reason: what came is good, nothing is half done, the next goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvsnap.formats.errors import NotAllStored, RemoteDenied, RemoteDown, RemoteError, StoreFull
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import PullReport, pull
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.recount import assert_counts
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import resume, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(16 * 24 + 3)
BYTES = 3712
"""Of a block's file, uncompressed."""


@pytest.fixture(autouse=True)
def pushed(machine: Machine, remote: Counted) -> None:
    save_and_push(machine("a"), remote, IDS, "chat", codec="raw")


def no_temporary_files(store: Store) -> bool:
    return not [path for path in store.place.temporary.glob("*") if not path.name.endswith(".lock")]


@pytest.mark.parametrize("after", [0, 1, 10, 23])
def test_ctrl_c_leaves_blocks_that_the_next_pull_finds(
    machine: Machine, remote: Counted, after: int
) -> None:
    b, told = machine("b"), [0]

    def interrupt(done: int, total: int) -> None:
        told[0] += 1
        if told[0] > after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(b, remote, "chat", progress=interrupt)
    assert not list(b.listing)
    assert_clean(b)
    assert_counts(b)
    again = machine("b")
    assert pull(again, remote, "chat").moved_files == 24 - after
    assert_saved(again, IDS, "chat")


@pytest.mark.parametrize("error", [RemoteDown, RemoteDenied, RemoteError])
@pytest.mark.parametrize("after", [0, 1, 9, 24])
def test_a_remote_that_fails_leaves_blocks_that_the_next_pull_finds(
    machine: Machine, remote: Counted, error: type[RemoteError], after: int
) -> None:
    b, told = machine("b"), [0]

    def fail(operation: str, key: str) -> None:
        told[0] += 1
        if told[0] > after + 1:
            raise error("no more")

    with pytest.raises(error):
        pull(b, Hooked(remote, fail), "chat")
    assert not list(b.listing)
    assert_clean(b)
    here = len(list(b.place.blocks.glob("*/*")))
    assert pull(b, remote, "chat").moved_files == 24 - here
    assert_saved(b, IDS, "chat")


def test_what_fits_of_a_session_is_stored(machine: Machine, remote: Counted) -> None:
    b = machine("b", capacity=10 * BYTES + 8000, min_free="0")
    with pytest.raises(NotAllStored, match="of 24 blocks") as caught:
        pull(b, remote, "chat")
    report = caught.value.report
    assert isinstance(report, PullReport)
    assert 5 < report.stored_blocks < 12
    engine = resume(b, IDS, "chat")
    assert engine.positions == list(range(16 * report.stored_blocks, len(IDS)))
    assert_clean(b)
    assert_counts(b)


def test_a_store_without_room_for_the_sessions_file_is_full(
    machine: Machine, remote: Counted
) -> None:
    b = machine("b", capacity=1000, min_free="0")
    with pytest.raises(StoreFull):
        pull(b, remote, "chat")
    assert not list(b.listing)
    assert no_temporary_files(b)


def test_what_comes_is_not_evicted_by_others_meanwhile(machine: Machine, remote: Counted) -> None:
    """Another process fills the store while blocks come: they are leased, its own go."""
    room = {"capacity": 40 * BYTES, "min_free": "0"}
    b, other, filled = machine("b", **room), machine("b", **room), [0]

    def fill(operation: str, key: str) -> None:
        if key.startswith("blocks/") and filled[0] < 10:
            filled[0] += 1
            turn(other, StampedEngine(), some_ids(48, 100 + filled[0]), codec="raw")

    pull(b, Hooked(remote, fill), "chat")
    assert_saved(b, IDS, "chat")
    assert_clean(b)
    assert_counts(b)


def test_two_pulls_of_one_session_at_once(machine: Machine, remote: Counted) -> None:
    first, second, nested = machine("b"), machine("b"), [False]

    def pull_too(operation: str, key: str) -> None:
        if key.startswith("blocks/") and not nested[0]:
            nested[0] = True
            pull(second, remote, "chat")

    pull(first, Hooked(remote, pull_too), "chat")
    assert_saved(first, IDS, "chat")
    assert_clean(first)
