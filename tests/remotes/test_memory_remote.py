"""The contract, for the fake that other tests use, and for the wrappers around it."""

from __future__ import annotations

import pytest

from kvsnap.kvstore.remotes import Options
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.remotes.limited import Limited
from kvsnap.kvstore.remotes.retried import Retried
from kvsnap.kvstore.remotes.wrapped import Wrapped
from kvsnap.testing.memory_remote import MemoryRemote
from kvsnap.testing.remote_suite import RemoteSuite


class TestMemory(RemoteSuite):
    @pytest.fixture(autouse=True)
    def place(self) -> None:
        self.kept = MemoryRemote()

    def make(self) -> Remote:
        return self.kept


class TestWrappers(TestMemory):
    """All but `Remembers`, which tells on purpose what was so a while ago."""

    def make(self) -> Remote:
        options = Options(timeout=60)
        return Wrapped(Counted(Retried(Limited(self.kept, options), options)))
