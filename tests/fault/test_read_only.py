"""A store that cannot be written is good to read from; saving to it is a clear refusal."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.errors import NotAllStored, StoreFull, StoreReadOnly
from kvsnap.kvstore.store import Store
from kvsnap.testing.faults import flip
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Child = Callable[..., list[dict]]
NOBODY = 65534


@pytest.fixture
def shared(store_path: Path) -> Iterator[Path]:
    """A filled store where every user can get at it; pytest's own folders are closed."""
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(70), "chat")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    copy = folder / "store"
    shutil.copytree(store_path, copy)
    yield copy
    shutil.rmtree(folder)


def open_up(path: Path, folders: int = 0o555, files: int = 0o444) -> None:
    for entry in [path, *path.rglob("*")]:
        entry.chmod(folders if entry.is_dir() else files)


def tree(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in path.rglob("*")}


@pytest.fixture
def nobody(child: Child) -> Callable[..., dict]:
    """Run an action of child.py as another user; modes mean nothing to root."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    environment = {**os.environ, "CHILD_USER": str(NOBODY)}
    return lambda *args: child(*args, env=environment, cwd="/")[0]


@pytest.mark.parametrize("index", ["there", "deleted", "damaged", "with its log"])
def test_another_user_reads_and_is_refused_the_save(
    shared: Path, nobody: Callable[..., dict], index: str
) -> None:
    if index != "with its log":
        for name in ("index.sqlite3-wal", "index.sqlite3-shm"):
            (shared / name).unlink(missing_ok=True)
    if index == "deleted":
        (shared / "index.sqlite3").unlink()
    if index == "damaged":
        (shared / "index.sqlite3").write_bytes(b"no database" * 999)
    open_up(shared)
    before = tree(shared)
    found = nobody("turn", shared, 80, 0, "chat", "no-save")
    assert (found["positions"], found["error"]) == ([*range(70, 80)], "")
    found = nobody("turn", shared, 80, 0, "chat", "save")
    assert found["positions"] == [*range(70, 80)]
    assert found["error"].startswith("StoreReadOnly: cannot write to the store")
    assert tree(shared) == before


def test_a_damaged_block_in_a_store_that_cannot_be_written_is_a_miss(
    shared: Path, nobody: Callable[..., dict]
) -> None:
    # A33: it cannot be set aside, and must not be tried for ever.
    with Store(shared) as store:
        ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 32")
        flip(store.place.block(name), -1)
    open_up(shared)
    found = nobody("turn", shared, 80, 0, "", "no-save")
    assert found["positions"] == [*range(32, 80)]
    assert found["stopped_by"].startswith("damaged: ")
    assert nobody("verify", shared)["bad"]


def test_blocks_that_another_user_may_not_read_are_a_miss_and_stay(
    shared: Path, nobody: Callable[..., dict]
) -> None:
    # A33: chmod 000 is no damage.
    with Store(shared) as store:
        ((name,),) = store.index.query("SELECT name FROM blocks WHERE start = 16")
        path = store.place.block(name)
    open_up(shared, 0o777, 0o666)
    path.chmod(0)
    found = nobody("turn", shared, 80, 0, "", "no-save")
    assert found["positions"] == [*range(16, 80)]
    assert "cannot be read" in found["stopped_by"]
    assert path.exists()
    path.chmod(0o666)
    found = nobody("turn", shared, 80, 0, "", "no-save")
    assert found["positions"] == [*range(64, 80)]


def test_a_store_closed_to_the_user_is_an_error_of_one_line(
    shared: Path, nobody: Callable[..., dict]
) -> None:
    open_up(shared, 0o700, 0o600)
    with pytest.raises(AssertionError, match="StoreError: cannot read"):
        nobody("turn", shared, 80, 0, "chat", "save")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    path = tmp_path / "mount"
    path.mkdir()
    if os.getuid() != 0 or _mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", path):
        pytest.skip("mounting a tmpfs is not allowed here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def _mount(*args: object) -> int:
    command = ["mount", *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True).returncode


def test_a_file_system_mounted_read_only_is_read_from(mounted: Path) -> None:
    path = mounted / "store"
    with Store(path) as store:
        turn(store, StampedEngine(), some_ids(140), "chat")
    if _mount("-o", "remount,ro", mounted):
        pytest.skip("remounting is not allowed here")
    engine = StampedEngine()
    with Store(path) as store:
        done = turn(store, engine, some_ids(150), "chat", save=False)
        assert engine.positions == [*range(140, 150)]
        with pytest.raises(StoreReadOnly):
            done.session.save()
        again = StampedEngine()
        turn(store, again, some_ids(150), "chat", save=False)
    assert again.positions == [*range(140, 150)]
    assert _mount("-o", "remount,rw", mounted) == 0
    assert done.session.save().revision == 2


def test_a_full_disk_is_told_and_keeps_what_was_stored(mounted: Path) -> None:
    # A47: until the file system is full, then on; and again after somebody made room.
    ballast, path = mounted / "ballast", mounted / "store"
    ballast.write_bytes(bytes(1_200_000))
    saved = 0
    # Pinned, and without a limit: else it would evict instead.
    unlimited = {"capacity": "unlimited", "min_free": "0"}
    with Store(path, **unlimited) as store, contextlib.suppress(StoreFull, NotAllStored):
        for saved in range(100):
            ids, name = some_ids(300, seed=saved), f"chat/{saved}"
            done = turn(store, StampedEngine(), ids, name, codec="raw", save=False)
            done.session.save(pinned=True)
    assert 1 < saved < 99
    with Store(path) as store:
        assert not list(store.place.temporary.glob("*.part"))
        for number in range(saved):
            engine = StampedEngine()
            turn(store, engine, some_ids(301, seed=number), f"chat/{number}", save=False)
            assert engine.positions == [300]
            engine.check_rows()
    ballast.unlink()
    with Store(path) as store:
        turn(store, StampedEngine(), some_ids(300, seed=saved), f"chat/{saved}", codec="raw")
        engine = StampedEngine()
        turn(store, engine, some_ids(300, seed=saved), f"chat/{saved}")
    assert engine.positions == [299]
