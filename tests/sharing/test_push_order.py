"""A reader elsewhere sees a pushed session whole or not at all, whatever ends the push."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import NotFound, RemoteDown, RemoteError
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.hooked import Hooked
from tests.sharing.objects import ME, block_files, files_of, only, save_and_push

Machine = Callable[..., Store]
IDS = some_ids(16 * 24 + 3)
"""24 blocks: more than move at once."""
WRITES = ("put", "replace")


def test_the_manifest_is_written_last(machine: Machine, remote: Counted) -> None:
    written: list[str] = []

    def note(operation: str, key: str) -> None:
        if operation in WRITES:
            written.append(key)

    save_and_push(machine("a"), Hooked(remote, note), IDS, "chat")
    assert len(written) == 24 + 2
    assert written[-1] == "manifests/default/chat.safetensors"
    assert not any(key.startswith("manifests/") for key in written[:-1])


def test_a_reader_meanwhile_sees_all_or_nothing(machine: Machine, remote: Counted) -> None:
    found: list[int] = []
    turn(machine("a"), StampedEngine(), IDS, "chat")
    stop = threading.Event()

    def read() -> None:
        number = 0
        while not stop.is_set() or not found:
            number += 1
            try:
                found.append(pull(machine(f"reader {number}"), remote, "chat").stored_blocks)
            except NotFound:
                found.append(0)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        push(machine("a"), remote, ME, "chat")
    finally:
        stop.set()
        reader.join()
    assert set(found) <= {0, 24}


@pytest.mark.parametrize("fails_at", [0, 1, 5, 16, 20, 23, 24, 25])
def test_a_push_that_was_cut_off_is_completed_by_the_next(
    machine: Machine, remote: Counted, there: Path, fails_at: int
) -> None:
    a, lock, begun = machine("a"), threading.Lock(), [0]
    turn(a, StampedEngine(), IDS, "chat")

    def fail(operation: str, key: str) -> None:
        with lock:
            if operation in WRITES:
                begun[0] += 1
                if begun[0] > fails_at:
                    raise RemoteDown("the cable was pulled")

    with pytest.raises(RemoteDown):
        push(a, Hooked(remote, fail), ME, "chat")
    with pytest.raises(NotFound):
        pull(machine("b"), remote, "chat")
    came = len(files_of(there))
    assert came == fails_at
    report = push(a, remote, ME, "chat")
    assert report.moved_files == 25 - came, "what came through does not move again"
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


@pytest.mark.parametrize("hole", [8, 14, 16, 23])
def test_holes_that_a_cut_off_push_left_are_found(
    machine: Machine, remote: Counted, there: Path, hole: int
) -> None:
    """Blocks move 16 at once, so what is cut off may lack any of the last 16."""
    save_and_push(machine("a"), remote, IDS, "chat")
    only(there, "manifests").unlink()
    block_files(there)[hole].unlink()
    order: list[str] = []
    hooked = Hooked(remote, lambda operation, key: order.append(f"{operation} {key}"))
    assert push(machine("a"), hooked, ME, "chat").moved_files == 1
    writes = [call for call in order if call.split()[0] in WRITES]
    assert [call.split()[0] for call in writes] == ["put", "replace"]


def test_few_questions_find_what_is_missing(machine: Machine, remote: Counted) -> None:
    """Of a long chain that is there already only its end is asked for before it moves."""
    a, ids = machine("a"), some_ids(16 * 300)
    for name in ("long", "again"):
        turn(a, StampedEngine(capacity=8192), ids, name)
    push(a, remote, ME, "long")
    asked = remote.calls("size")
    push(a, remote, ME, "again", dry_run=True)
    assert remote.calls("size") - asked < 2 * 16 + 2 * 9 + 4


def test_what_vanished_before_the_manifest_was_up_is_sent_again(
    machine: Machine, remote: Counted, there: Path
) -> None:
    a = machine("a")
    save_and_push(a, remote, IDS, "first")
    turn(a, StampedEngine(), IDS, "second")
    victims = block_files(there)[2:5]

    def vanish(operation: str, key: str) -> None:
        if operation == "replace":
            for path in victims:
                path.unlink()

    report = push(a, Hooked(remote, vanish), ME, "second")
    assert report.moved_files == 1 + 3
    b = machine("b")
    pull(b, remote, "second")
    assert_saved(b, IDS, "second")


def test_a_remote_that_swallows_what_it_took_is_told_of(machine: Machine, remote: Counted) -> None:
    class Swallows(Hooked):
        def put(self, key: str, data: object) -> None:
            if not key.startswith("blocks/"):
                self.remote.put(key, data)  # type: ignore[arg-type]

    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    with pytest.raises(RemoteError, match="took 24 files and does not have them"):
        push(a, Swallows(remote, lambda operation, key: None), ME, "chat")
