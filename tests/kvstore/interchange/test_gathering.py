"""Files of another tool on disk: read when asked for, links not followed, pipes not opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsnap.formats.errors import Damaged, NotFound, Unsupported
from kvsnap.kvstore.interchange.gathering import HEAD, OnDisk, is_portable


def test_a_file_is_known_by_its_name_and_a_folders_files_by_paths_that_begin_with_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "hash" / "deeper").mkdir(parents=True)
    (tmp_path / "hash" / "a.bin").write_bytes(b"a")
    (tmp_path / "hash" / "deeper" / "b.bin").write_bytes(b"b")
    assert dict(OnDisk(tmp_path / "hash" / "a.bin")) == {"a.bin": b"a"}
    assert dict(OnDisk(tmp_path / "hash")) == {"hash/a.bin": b"a", "hash/deeper/b.bin": b"b"}


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * (HEAD + 5))
    files = OnDisk(tmp_path)
    (tmp_path / "b").unlink()
    assert len(files) == 3
    first = files[f"{tmp_path.name}/a"]
    assert len(first) == HEAD + 5
    assert len(files.heads()[f"{tmp_path.name}/c"]) == HEAD
    with pytest.raises(NotFound, match="cannot read"):
        files[f"{tmp_path.name}/b"]


def test_links_and_pipes_in_a_folder_are_passed_over(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"s")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own").write_bytes(b"o")
    (folder / "to-file").symlink_to(outside / "secret")
    (folder / "to-folder").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    assert list(OnDisk(folder)) == ["folder/own"]


def test_what_is_no_file_is_refused_and_a_file_that_turns_into_a_link_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unsupported):
        OnDisk(tmp_path / "pipe")
    with pytest.raises(NotFound):
        OnDisk(tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"x")
    files = OnDisk(tmp_path / "file")
    (tmp_path / "file").unlink()
    (tmp_path / "file").symlink_to("/etc/passwd")
    with pytest.raises(Damaged):
        files["file"]


def test_a_portable_file_is_a_tar_and_a_pipe_is_not_opened_to_see(tmp_path: Path) -> None:
    tar = tmp_path / "x.kvsnap"
    tar.write_bytes(bytes(257) + b"ustar\x0000" + bytes(248))
    assert is_portable(tar)
    tar.write_bytes(bytes(512))
    assert not is_portable(tar)
    os.mkfifo(tmp_path / "pipe")
    assert not is_portable(tmp_path / "pipe")
    assert not is_portable(tmp_path)
    assert is_portable(tmp_path / "nothing")
