"""The limits on operations at once and on the time of each, around remotes that hang."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from kvsnap.formats.errors import (
    NotFound,
    RemoteDown,
    RemoteError,
)
from kvsnap.kvstore.remotes import Options
from kvsnap.kvstore.remotes.limited import HUNG_PER_SLOT, Limited
from tests.remotes.failing import KEY, OPERATIONS, Failing, Hanging


def hung_threads() -> int:
    return sum(thread.name.startswith("remote ") for thread in threading.enumerate())


def test_no_more_operations_run_at_once_than_allowed():
    hanging = Hanging()
    hanging.remote.put(KEY, b"x")
    remote = Limited(hanging, Options(timeout=60, at_once=3))
    threads = [threading.Thread(target=remote.get, args=(KEY, 9)) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= hanging.most_at_once <= 3


@pytest.mark.parametrize("name", OPERATIONS)
def test_errors_and_results_pass_the_limits(name):
    options = Options(timeout=60, at_once=2)
    assert OPERATIONS[name](Limited(Failing(), options)) == OPERATIONS[name](Failing())
    for kind in (NotFound, RemoteError, ZeroDivisionError):
        with pytest.raises(kind, match="so"):
            OPERATIONS[name](Limited(Failing(kind("so")), options))


def test_a_backend_that_hangs_is_down_in_time_and_its_place_is_free_again():
    hanging = Hanging()
    hanging.remote.put(KEY, b"x")
    remote = Limited(hanging, Options(timeout=0.5, at_once=2))
    began = time.monotonic()
    for _ in range(4):
        with pytest.raises(RemoteDown, match=r"memory://test: get hang: no answer within 0\.5 s"):
            remote.get("hang", 9)
    assert time.monotonic() - began >= 2.0
    assert remote.get(KEY, 9).data == b"x"
    hanging.let_go.set()


def test_hung_operations_do_not_pile_up_and_are_forgotten_when_they_end():
    hanging = Hanging()
    hanging.remote.put(KEY, b"x")
    remote = Limited(hanging, Options(timeout=0.5, at_once=1))
    for _ in range(HUNG_PER_SLOT):
        with pytest.raises(RemoteDown, match="no answer within"):
            remote.get("hang", 9)
    running = hung_threads()
    for _ in range(50):
        with pytest.raises(RemoteDown, match="4 earlier operations got no answer yet"):
            remote.get(KEY, 9)
    assert hung_threads() <= running
    hanging.let_go.set()
    while hung_threads():
        time.sleep(0.001)
    assert remote.get(KEY, 9).data == b"x"


def test_waiting_for_a_place_ends_in_time_too():
    hanging = Hanging()
    remote = Limited(hanging, Options(timeout=0.3, at_once=1))
    first = threading.Thread(target=pytest.raises, args=(RemoteDown, remote.get, "hang", 9))
    first.start()
    while not hanging.at_once:
        time.sleep(0.001)
    with pytest.raises(RemoteDown, match=r"no answer within 0\.3 s"):
        remote.get("hang", 9)
    first.join()
    hanging.let_go.set()


def test_a_put_that_hangs_does_not_see_what_its_caller_writes_next():
    hanging = Hanging()
    remote = Limited(hanging, Options(timeout=0.02))
    scratch = bytearray(b"true rows")
    with pytest.raises(RemoteDown):
        remote.put("hang", memoryview(scratch))
    scratch[:] = b"other one"
    hanging.let_go.set()
    while not hanging.seen:
        time.sleep(0.001)
    assert hanging.seen == [b"true rows"]


def test_a_listing_is_handed_on_page_by_page_and_may_not_hang():
    hanging = Hanging()
    for number in range(2500):
        hanging.remote.put(f"k/{number}", b"")
    remote = Limited(hanging, Options(timeout=2))
    entries = remote.list("k/")
    assert len([next(entries) for _ in range(2000)]) == 2000
    with pytest.raises(RemoteDown, match="list k/: no answer"):
        list(entries)
    hanging.let_go.set()
    assert len(list(Limited(hanging, Options(timeout=60)).list("k/"))) == 2500


def test_a_process_ends_although_an_operation_hangs():
    code = """
import threading
from kvsnap.formats.errors import RemoteDown
from kvsnap.kvstore.remotes import Options
from kvsnap.kvstore.remotes.limited import Limited
from kvsnap.testing.memory_remote import MemoryRemote

class Hangs(MemoryRemote):
    def size(self, key):
        threading.Event().wait()

try:
    Limited(Hangs(), Options(timeout=0.05)).size("k")
except RemoteDown:
    print("down")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("down\n", "")
