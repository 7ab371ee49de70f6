"""A store on a network file system is refused, by the table of mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsnap.formats.errors import StoreError
from kvsnap.kvstore import mounts
from kvsnap.kvstore.mounts import file_system
from kvsnap.kvstore.store import Store

LINE = "36 35 98:0 / {point} rw,noatime shared:1 - {kind} server:/export rw\n"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    monkeypatch.setattr(mounts, "MOUNTS", path)
    return path


def mounted(table: Path, *found: tuple[object, str]) -> None:
    lines = [
        LINE.format(point=str(point).replace(" ", "\\040"), kind=kind) for point, kind in found
    ]
    table.write_text("".join(lines))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "lustre"])
def test_a_store_on_a_network_file_system_is_refused_with_what_to_do(
    tmp_path: Path, table: Path, kind: str
) -> None:
    mounted(table, ("/", "ext4"), (tmp_path, kind))
    with pytest.raises(StoreError) as told:
        Store(tmp_path / "store")
    assert kind in told.value.what
    assert "remote" in told.value.hint
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "apfs"])
def test_a_store_on_a_local_disk_is_opened(tmp_path: Path, table: Path, kind: str) -> None:
    mounted(table, ("/", "nfs4"), (tmp_path, kind))
    Store(tmp_path / "store").close()


def test_the_deepest_mount_counts_and_the_last_of_two_on_one_place(
    tmp_path: Path, table: Path
) -> None:
    mounted(table, (tmp_path / "a b", "nfs"), ("/", "ext4"), (tmp_path, "xfs"), (tmp_path, "btrfs"))
    assert file_system(tmp_path / "a b" / "store") == "nfs"
    assert file_system(tmp_path / "a") == "btrfs"
    assert file_system(Path("/other")) == "ext4"


@pytest.mark.parametrize("text", ["", "\n", "nonsense\n", "1 2 3:4 /\n", " - \n", None])
def test_a_table_that_says_nothing_refuses_nothing(
    tmp_path: Path, table: Path, text: str | None
) -> None:
    if text is not None:
        table.write_text(text)
    assert file_system(tmp_path) is None
    Store(tmp_path / "store").close()
