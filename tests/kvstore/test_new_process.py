"""What one process stored, the next finds: names hang on nothing that a process is born with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.kvstore.store import Store
from kvsnap.testing.engine_suite import LENGTHS
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

Child = Callable[..., list[dict]]


def files_of(path: Path) -> dict[str, tuple[int, int, int]]:
    found = {}
    for file in [*path.glob("blocks/*/*"), *path.glob("sessions/*/*")]:
        status = file.stat()
        found[str(file)] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found


def delete_index(path: Path) -> None:
    for file in path.glob("index.sqlite3*"):
        file.unlink()


@pytest.mark.parametrize("index", ["kept", "deleted"])
@pytest.mark.parametrize("length", [1, 16, 33, 49])
def test_a_new_process_computes_one_token_and_rewrites_nothing(
    store_path: Path, child: Child, length: int, index: str
) -> None:
    # A11, A17: also where the index was deleted in between.
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(length), "chat")
    before = files_of(store_path)
    if index == "deleted":
        delete_index(store_path)
    (found,) = child("turn", store_path, length, 0, "chat", "no-save")
    assert found["positions"] == [length - 1]
    assert found["error"] == ""
    (found,) = child("turn", store_path, length, 0, "", "save")
    assert found["written"] == 0
    assert files_of(store_path) == before


@pytest.mark.parametrize("length", LENGTHS)
def test_a_deleted_index_is_rebuilt_from_the_files(store_path: Path, length: int) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(length + 1)[:length])
        rows = store.index.query(_ROWS)
    before = files_of(store_path)
    delete_index(store_path)
    with Store(store_path) as store:
        assert store.index.query(_ROWS) == rows
        engine = StampedEngine()
        done = turn(store, engine, some_ids(length + 1))
        assert engine.positions == list(range(length // 16 * 16, length + 1))
        assert done.saved is not None
        assert done.saved.blocks_written == (length + 1) // 16 - length // 16
    after = files_of(store_path)
    assert {name: after[name] for name in before} == before


_ROWS = "SELECT name, start, tokens, bytes, codec, reachable, lost FROM blocks ORDER BY name"


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
    ],
)
def test_names_do_not_hang_on_the_environment(
    store_path: Path, tmp_path: Path, child: Child, environment: dict[str, str]
) -> None:
    # A11, A12
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(49))
    env = {**os.environ, **environment}
    (found,) = child("turn", store_path, 49, 0, "", "save", env=env, cwd=tmp_path)
    assert (found["positions"], found["written"]) == ([48], 0)


def test_only_index_sqlite3_itself_deleted_leaves_no_stale_log(
    store_path: Path, child: Child
) -> None:
    """SQLite must not replay the log of the deleted database into the new one."""
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(49))
        log = (store_path / "index.sqlite3-wal").read_bytes()
    delete_index(store_path)
    (store_path / "index.sqlite3-wal").write_bytes(log)
    (found,) = child("turn", store_path, 49, 0, "", "save")
    assert (found["positions"], found["written"]) == ([48], 0)


def test_the_index_may_be_deleted_under_a_running_store(store_path: Path) -> None:
    with Store(store_path) as store:
        turn(store, StampedEngine(), some_ids(49), "chat")
        before = files_of(store_path)
        delete_index(store_path)
        engine = StampedEngine()
        done = turn(store, engine, some_ids(49))
        assert engine.positions == [48]
        assert done.saved is not None
        assert done.saved.blocks_written == 0
        assert files_of(store_path) == before
