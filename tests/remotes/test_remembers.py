"""The short memory of failure, around a remote in memory."""

from __future__ import annotations

import threading

import pytest

from kvsnap.formats.errors import (
    Damaged,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
)
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.remembers import MOST_KEYS, Remembers
from kvsnap.testing.memory_remote import MemoryRemote
from tests.remotes.failing import KEY, OPERATIONS, Clock, Failing, Hanging, down


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("then", OPERATIONS)
def test_after_a_failure_nothing_is_asked_for_a_while(name, then):
    clock, failing = Clock(), Failing(down())
    remote = Remembers(failing, 30, clock)
    with pytest.raises(RemoteDown, match="503"):
        OPERATIONS[name](remote)
    clock.now += 29
    with pytest.raises(RemoteDown, match="not asked again within 30 s of a failure: 503"):
        OPERATIONS[then](remote)
    assert failing.asked == 1
    clock.now += 1
    assert OPERATIONS[then](remote) == OPERATIONS[then](Failing())


@pytest.mark.parametrize("kind", [RemoteDenied, RemoteError, Damaged])
def test_other_errors_are_not_remembered(kind):
    remote = Remembers(Failing(kind("no")), 30, Clock())
    with pytest.raises(kind):
        remote.get(KEY, 9)
    assert remote.get(KEY, 9).data == b"data"


@pytest.mark.parametrize("success", ["get", "put"])
def test_an_object_that_moves_after_a_failure_shows_that_the_remote_is_up(success):
    """It was under way when another operation failed."""
    hanging = Hanging()
    hanging.remote.put("hang", b"data")
    remote = Remembers(hanging, 30, Clock())
    operation = {"get": lambda: remote.get("hang", 9), "put": lambda: remote.put("k", b"x")}
    thread = threading.Thread(target=operation[success])
    thread.start()
    hanging.size = lambda key: Failing(down()).size(key)
    with pytest.raises(RemoteDown, match="503"):
        remote.size("other")
    with pytest.raises(RemoteDown, match="not asked"):
        remote.delete("k/more")
    hanging.let_go.set()
    thread.join()
    remote.delete("k/more")
    with pytest.raises(RemoteDown, match="not asked"):
        remote.get("other", 9)


@pytest.mark.parametrize("read", ["get", "get_start"])
def test_an_object_that_a_read_did_not_find_is_not_there_whatever_its_size_says(read):
    """A52: a listing or HEAD that speaks of an object whose data is gone."""
    clock, failing = Clock(), Failing(NotFound("404"))
    remote = Remembers(failing, 30, clock)
    with pytest.raises(NotFound):
        OPERATIONS[read](remote)
    assert remote.size(KEY) is None
    for name in ("get", "get_start"):
        with pytest.raises(NotFound, match=KEY):
            OPERATIONS[name](remote)
    assert failing.asked == 1
    clock.now += 30
    assert remote.size(KEY) == 4


@pytest.mark.parametrize("write", ["put", "replace"])
def test_a_write_ends_the_memory_of_an_absent_object(write):
    failing = Failing(NotFound("404"))
    remote = Remembers(failing, 30, Clock())
    with pytest.raises(NotFound):
        remote.get(KEY, 9)
    OPERATIONS[write](remote)
    assert remote.size(KEY) == 4
    assert remote.get(KEY, 9).data == b"more"


def test_a_failure_changes_no_verdict():
    failing = Failing(NotFound("404"), down())
    remote = Remembers(failing, 30, Clock())
    with pytest.raises(NotFound):
        remote.get(KEY, 9)
    with pytest.raises(RemoteDown):
        remote.size("other")
    assert remote.size(KEY) is None
    with pytest.raises(NotFound):
        remote.get(KEY, 9)
    with pytest.raises(RemoteDown):
        remote.size("third")


def test_what_only_size_did_not_find_is_asked_for_again():
    store = MemoryRemote()
    remote = Remembers(store, 30, Clock())
    assert remote.size("k") is None
    store.put("k", b"pushed by somebody else")
    assert remote.size("k") == 23


def test_the_memory_is_bounded():
    store = MemoryRemote()
    remote = Counted(store)
    remembers = Remembers(remote, 30, Clock())
    for number in range(MOST_KEYS + 10):
        with pytest.raises(NotFound):
            remembers.get(f"k/{number}", 9)
    remembers.size("k/0")
    remembers.size(f"k/{MOST_KEYS}")
    assert remote.calls("size") == 1
