"""The disk of the power-cut tests forgets exactly what was not synced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.testing.powercut import ForgetfulDisk, PowerCut

SEEDS = range(60)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def disk(top: Path) -> Iterator[ForgetfulDisk]:
    (top / "old").write_bytes(b"old")
    (top / "folder").mkdir()
    with ForgetfulDisk(top) as disk:
        yield disk


@pytest.fixture
def after(disk: ForgetfulDisk, tmp_path: Path) -> Callable[..., dict[str, bytes | None]]:
    """What a cut leaves: relative paths to bytes, folders to None."""
    count = iter(range(10_000))

    def cut(**options: object) -> dict[str, bytes | None]:
        path = disk.cut(tmp_path / f"cut{next(count)}", **options)
        return {
            str(found.relative_to(path)): found.read_bytes() if found.is_file() else None
            for found in path.rglob("*")
        }

    return cut


AT_FIRST = {"old": b"old", "folder": None}


def write(path: Path, data: bytes, *, synced: bool = False) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.write(handle, data)
    if synced:
        os.fsync(handle)
    os.close(handle)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def test_what_was_there_at_the_start_is_durable(after: Callable) -> None:
    assert after() == AT_FIRST


def test_a_file_that_was_not_synced_is_lost(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"new")
    assert after() == AT_FIRST


def test_a_synced_file_in_an_unsynced_folder_is_lost(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"new", synced=True)
    assert after() == AT_FIRST


def test_a_synced_file_in_a_synced_folder_is_kept(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"new", synced=True)
        sync(top)
    assert after() == AT_FIRST | {"new": b"new"}


@pytest.mark.parametrize(
    ("unsynced", "left"),
    [("empty", b""), ("short", b"ne"), ("zeros", bytes(4)), ("torn", b"ne\0\0")],
)
def test_an_unsynced_file_in_a_synced_folder_has_lost_its_content(
    disk: ForgetfulDisk, top: Path, after: Callable, unsynced: str, left: bytes
) -> None:
    with disk.running():
        write(top / "new", b"news")
        sync(top)
    assert after(unsynced=unsynced) == AT_FIRST | {"new": left}


def test_what_is_written_after_a_sync_is_lost(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"first", synced=True)
        sync(top)
        write(top / "new", b"second")
    assert after() == AT_FIRST | {"new": b"first"}


def test_a_rename_in_an_unsynced_folder_is_undone(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        (top / "old").rename(top / "renamed")
    assert after() == AT_FIRST


def test_a_file_that_replaced_another_gives_way_to_it_again(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"new", synced=True)
        (top / "new").replace(top / "old")
    assert after() == AT_FIRST
    with disk.running():
        sync(top)
    assert after() == AT_FIRST | {"old": b"new"}


def test_a_rename_between_folders_needs_both_synced(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        (top / "old").rename(top / "folder" / "moved")
        sync(top / "folder")
    assert after() == AT_FIRST | {"folder/moved": b"old"}
    with disk.running():
        sync(top)
    assert after() == {"folder": None, "folder/moved": b"old"}


def test_a_removal_in_an_unsynced_folder_is_undone(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        (top / "old").unlink()
        (top / "folder").rmdir()
        write(top / "another", b"that may take the old one's inode")
    assert after() == AT_FIRST
    with disk.running():
        sync(top)
    assert after() == {"another": b""}


def test_a_new_folder_needs_a_sync_of_its_parent(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        (top / "a" / "b").mkdir(parents=True)
        write(top / "a" / "b" / "new", b"new", synced=True)
        sync(top / "a" / "b")
        sync(top / "a")
    assert after() == AT_FIRST
    with disk.running():
        sync(top)
    assert after() == AT_FIRST | {"a": None, "a/b": None, "a/b/new": b"new"}


def test_files_made_past_the_patched_calls_are_found_by_the_sync(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        with (top / "new").open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        sync(top)
    assert after() == AT_FIRST | {"new": b"new"}


def test_the_program_ends_in_place_of_the_chosen_call_and_changes_nothing_after_it(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    unreached = []
    with disk.running(stop_at=2):
        write(top / "new", b"new", synced=True)  # calls 0 and 1
        try:
            sync(top)
        finally:
            with pytest.raises(PowerCut):
                (top / "old").unlink()
            with pytest.raises(PowerCut):
                write(top / "more", b"more")
        unreached.append(True)
    assert (unreached, disk.stopped) == ([], True)
    assert disk.calls == ["open new", "fsync new", "fsync ."]
    assert sorted(path.name for path in top.iterdir()) == ["folder", "new", "old"]
    assert after() == AT_FIRST


def test_a_killed_program_leaves_its_files_to_the_next_one(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running(stop_at=1):
        write(top / "new", b"new", synced=True)
    with disk.running():
        sync(top / "new")
        sync(top)
    assert not disk.stopped
    assert after() == AT_FIRST | {"new": b"new"}


def test_chance_keeps_each_unsynced_change_or_loses_it(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        write(top / "new", b"new")
        write(top / "synced", b"synced", synced=True)
        (top / "old").rename(top / "folder" / "moved")
    trees = [after(seed=seed) for seed in SEEDS]
    for name in ("new", "synced", "old", "folder/moved"):
        assert {name in tree for tree in trees} == {True, False}, name
    assert {tree.get("synced") for tree in trees} == {None, b"synced"}
    assert {tree.get("new") for tree in trees} >= {None, b"", bytes(3), b"new"}
    assert {tree.get("old") for tree in trees} == {None, b"old"}


def test_chance_leaves_the_old_file_or_one_that_replaced_it_and_never_none(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    with disk.running():
        for data in (b"second", b"third"):
            write(top / "new", data, synced=True)
            (top / "new").replace(top / "old")
    assert {after(seed=seed)["old"] for seed in SEEDS} == {b"old", b"second", b"third"}


def test_the_same_seed_gives_the_same_tree(disk: ForgetfulDisk, top: Path, after: Callable) -> None:
    with disk.running():
        for number in range(9):
            write(top / f"new{number}", bytes([number]) * 9000)
    assert after(seed=5) == after(seed=5) != after(seed=6)


def test_the_index_is_lost_or_kept_as_it_is(
    disk: ForgetfulDisk, top: Path, after: Callable
) -> None:
    (top / "folder" / "index.sqlite3").write_bytes(b"rows")
    assert after() == AT_FIRST
    assert after(index="kept") == AT_FIRST | {"folder/index.sqlite3": b"rows"}
