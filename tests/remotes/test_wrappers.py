"""Retry, dry-run and counting, around a remote in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
)
from kvsnap.kvstore.remotes import Options
from kvsnap.kvstore.remotes.base import Entry
from kvsnap.kvstore.remotes.counted import Call, Counted
from kvsnap.kvstore.remotes.dry_run import DryRun, Write
from kvsnap.kvstore.remotes.retried import LONGEST_WAIT, Retried
from kvsnap.kvstore.remotes.wrapped import Wrapped
from kvsnap.testing.memory_remote import MemoryRemote
from tests.remotes.failing import KEY, OPERATIONS, Failing, down


def retried(remote: Wrapped, tries: int = 3) -> tuple[Retried, list[float]]:
    waits: list[float] = []
    return Retried(remote, Options(tries=tries), waits.append, lambda low, high: high), waits


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_may_pass_is_tried_again(name):
    failing = Failing(down(), down())
    remote, waits = retried(failing)
    assert OPERATIONS[name](remote) == OPERATIONS[name](Failing())
    assert waits == [0.1, 0.2]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_last_failure_is_the_callers(name):
    errors = [RemoteDown(str(number)) for number in range(5)]
    remote, waits = retried(Failing(*errors))
    with pytest.raises(RemoteDown, match="2"):
        OPERATIONS[name](remote)
    assert len(waits) == 2


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", [NotFound, RemoteDenied, RemoteError, Damaged])
def test_what_will_not_pass_is_not_tried_again(name, kind):
    failing = Failing(kind("no"))
    remote, waits = retried(failing)
    with pytest.raises(kind):
        OPERATIONS[name](remote)
    assert (failing.asked, waits) == (1, [])


def test_waits_grow_twofold_up_to_a_limit_and_are_drawn_from_zero_upwards():
    drawn: list[tuple[float, float]] = []

    def draw(low: float, high: float) -> float:
        drawn.append((low, high))
        return low

    waits: list[float] = []
    remote = Retried(Failing(*[down()] * 8), Options(tries=9), waits.append, draw)
    remote.size(KEY)
    assert [high for _, high in drawn] == [0.1, 0.2, 0.4, 0.8, 1.6, *[LONGEST_WAIT] * 3]
    assert {low for low, _ in drawn} == {0.0}
    assert waits == [0.0] * 8


def test_a_replace_that_went_through_before_its_answer_was_lost_is_a_success():
    failing = Failing(down(), after=True)
    remote, _ = retried(failing)
    assert remote.replace(KEY, b"own", failing.remote.get(KEY, 9).version)
    assert failing.remote.get(KEY, 9).data == b"own"


def test_a_replace_is_not_repeated_over_what_somebody_else_wrote_meanwhile():
    failing = Failing(down(), after=True)
    remote = Retried(
        failing, Options(), lambda _: failing.remote.put(KEY, b"another, and longer"), max
    )
    assert not remote.replace(KEY, b"own", failing.remote.get(KEY, 9).version)
    assert failing.remote.get(KEY, 99).data == b"another, and longer"


def test_a_replace_that_did_not_go_through_is_tried_again():
    failing = Failing(down(), down())
    remote, _ = retried(failing, tries=4)
    assert remote.replace(KEY, b"own", failing.remote.get(KEY, 9).version)
    failing.errors.append(down())
    assert remote.replace("blocks/new", b"own", None)
    assert failing.remote.get("blocks/new", 9).data == b"own"


class Breaks(Wrapped):
    """Listings that break off before their third entry as often as told."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryRemote())
        self.times = times
        self.also: list[str] = []
        for number in range(5):
            self.remote.put(f"k/{number}", b"x")

    def list(self, prefix: str) -> Iterator[Entry]:
        yield from (Entry(key, 1, 0.0) for key in self.also)
        for number, entry in enumerate(self.remote.list(prefix)):
            if number == 2 and self.times:
                self.times -= 1
                raise RemoteDown("broke off")
            yield entry


def test_a_listing_that_breaks_off_goes_on_behind_what_was_handed_out():
    remote, waits = retried(Breaks(2))
    assert [entry.key for entry in remote.list("k/")] == [f"k/{n}" for n in range(5)]
    assert len(waits) == 2


def test_a_listing_that_comes_back_as_another_one_is_not_patched_together():
    breaks = Breaks(1)
    remote = Retried(breaks, Options(), lambda _: breaks.also.append("k/before"), max)
    with pytest.raises(RemoteDown, match="is another"):
        list(remote.list("k/"))


def test_a_dry_run_reads_and_notes_what_it_would_write():
    store = MemoryRemote()
    store.put(KEY, b"data")
    remote = DryRun(store)
    version = remote.get(KEY, 9).version
    remote.put("k/new", memoryview(b"12345"))
    remote.delete(KEY)
    assert remote.replace(KEY, b"other", version)
    assert not remote.replace(KEY, b"other", "stale")
    assert not remote.replace(KEY, b"other", None)
    assert remote.replace("k/none", b"o", None)
    assert remote.writes == [
        Write("put", "k/new", 5),
        Write("delete", KEY),
        Write("replace", KEY, 5),
        Write("replace", "k/none", 1),
    ]
    assert remote.bytes_out == 11
    assert [entry.key for entry in remote.list("")] == [KEY]
    assert store.get(KEY, 9).data == b"data"


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_are_counted_by_operation(name):
    ticks = iter(range(100))
    told: list[Call] = []
    remote = Counted(Failing(), told.append, lambda: float(next(ticks)))
    OPERATIONS[name](remote)
    OPERATIONS[name](remote)
    bytes_in = {"get": 4, "get_start": 2}.get(name, 0)
    bytes_out = {"put": 4, "replace": 4}.get(name, 0)
    second = {"replace": 0}.get(name, bytes_out)  # the version is another one by then
    count = remote.counts()[name]
    assert (count.calls, count.seconds, count.errors) == (2, 2.0, {})
    assert (count.bytes_in, count.bytes_out) == (2 * bytes_in, bytes_out + second)
    assert (remote.bytes_in, remote.bytes_out) == (count.bytes_in, count.bytes_out)
    assert told == [
        Call(name, 1.0, bytes_in, bytes_out),
        Call(name, 1.0, bytes_in, second),
    ]
    assert remote.calls("none") == 0


@pytest.mark.parametrize("name", OPERATIONS)
def test_errors_are_counted_by_kind_and_an_absent_object_is_none(name):
    remote = Counted(Failing(down(), down(), RemoteDenied("no"), NotFound("none")))
    for _ in range(4):
        with pytest.raises(KvsnapError):
            OPERATIONS[name](remote)
    count = remote.counts()[name]
    assert (count.calls, count.errors) == (4, {"RemoteDown": 2, "RemoteDenied": 1})
    assert (count.bytes_in, count.bytes_out) == (0, 0)


def test_threads_lose_no_count():
    store = MemoryRemote()
    store.put(KEY, b"12345")
    remote = Counted(store)
    threads = [
        threading.Thread(target=lambda: [remote.get(KEY, 9) for _ in range(500)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (remote.calls("get"), remote.bytes_in) == (4000, 20_000)
