"""On a disk with not a byte left: reading works, and gc and rm make the room that they need."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A store of 20 sessions; another program has filled the disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        with Store(disk / "store") as store:
            for seed in range(20):
                turn(store, StampedEngine(layers=4), some_ids(300, seed=seed), f"chat/{seed}")
        with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        yield disk / "store"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_reading_works_as_in_a_folder_that_cannot_be_written(full: Path) -> None:
    with Store(full) as store:
        assert len(list(store.listing)) == 20
        assert stats(store).blocks > 0
        engine = StampedEngine(layers=4)
        done = turn(store, engine, some_ids(300, seed=19), "chat/19", save=False)
        assert done.resumed.reused_tokens == 299
        engine.check_rows()
        assert verify_store(store).bad == []


def test_gc_makes_room_for_the_index_first_and_then_does_its_work(full: Path) -> None:
    with Store(full, capacity="300kB") as store:
        report = gc(store)
        assert report.kept_bytes <= 300_000
        assert verify_store(store).bad == []
    with Store(full) as store:
        assert turn(store, StampedEngine(layers=4), some_ids(20), "new").saved is not None


def test_a_session_can_be_removed(full: Path) -> None:
    with Store(full) as store:
        assert store.sessions.remove("default", "chat/3") > 0
    with Store(full) as store:
        assert "chat/3" not in {entry.facts.name for entry in store.listing}
