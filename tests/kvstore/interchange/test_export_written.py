"""Where an export is put: whole or not at all, and in the place of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsnap.formats.errors import StoreError, UsageError
from kvsnap.kvstore.interchange.exporting import write_files

FILES = {"a/b": b"1", "c": b"2"}


def written(folder: Path) -> dict[str, bytes]:
    return {
        each.relative_to(folder).as_posix(): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file()
    }


def test_a_folder_is_replaced_by_force_only_where_nothing_else_is_in_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_files(FILES, out, as_folder=True)
    with pytest.raises(UsageError, match="there already"):
        write_files(FILES, out, as_folder=True)
    write_files({**FILES, "c": b"3"}, out, as_folder=True, force=True)
    assert written(out) == {"a/b": b"1", "c": b"3"}
    (out / "a" / "mine").write_text("mine")
    with pytest.raises(UsageError, match="something else"):
        write_files(FILES, out, as_folder=True, force=True)
    assert written(out) == {"a/b": b"1", "c": b"3", "a/mine": b"mine"}
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_what_is_written_is_for_its_owner_alone(tmp_path: Path) -> None:
    write_files({"a": b"1"}, tmp_path / "file", as_folder=False)
    write_files(FILES, tmp_path / "folder", as_folder=True)
    for path in (tmp_path / "file", tmp_path / "folder" / "a" / "b", tmp_path / "folder" / "c"):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("there", ["file", "link to a folder", "link in the folder"])
def test_what_is_no_folder_of_the_same_files_stays(tmp_path: Path, there: str) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    if there == "file":
        out.write_text("mine")
    elif there == "link to a folder":
        out.symlink_to(mine)
    else:
        out.mkdir()
        (out / "link").symlink_to(mine)
    with pytest.raises(UsageError, match="something else"):
        write_files(FILES, out, as_folder=True, force=True)
    assert out.exists()
    assert written(mine) == {}


def test_a_file_never_takes_a_folders_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path, Path("/"), Path(), Path("..")):
        with pytest.raises(UsageError, match="is a folder"):
            write_files({"a": b"1"}, out, as_folder=False, force=True)
    write_files(FILES, Path(), as_folder=True, force=True)  # an empty one that one stands in
    assert written(tmp_path) == FILES


def test_a_pipe_or_device_stays_one(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "stdout"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for out in (pipe, link):
        with pytest.raises(UsageError, match="no regular file"):
            write_files({"a": b"1"}, out, as_folder=False, force=True)
    assert link.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pipe", "stdout"]


def test_a_path_through_a_file_is_told_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot write .*/file/out: "):
        write_files({"a": b"1"}, tmp_path / "file" / "out", as_folder=False)
