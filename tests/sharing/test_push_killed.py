"""kill -9 in the middle of a push: the remote holds a prefix, nobody sees a session, the next push ends it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import NotFound
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import ME, files_of

Machine = Callable[..., Store]
IDS = some_ids(16 * 24 + 3)
CHILD = """
import os, signal, sys
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store

class Dies(Folder):
    left = int(sys.argv[3])
    def _one_less(self):
        Dies.left -= 1
        if Dies.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def put(self, key, data):
        self._one_less()
        super().put(key, data)
    def replace(self, key, data, version):
        self._one_less()
        return super().replace(key, data, version)

with Store(sys.argv[1]) as store:
    push(store, Dies(sys.argv[2], 5.0), "default", "chat")
"""


@pytest.mark.parametrize("writes", [0, 7, 25])
def test_the_next_push_moves_what_is_missing(
    machine: Machine, remote: Counted, there: Path, writes: int
) -> None:
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    command = [sys.executable, "-c", CHILD, str(a.path), remote.url, str(writes)]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    with pytest.raises(NotFound):
        pull(machine("b"), remote, "chat")
    came = len(files_of(there))
    assert came <= writes
    assert push(a, remote, ME, "chat").moved_files == 25 - came
    b = machine("b")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")
