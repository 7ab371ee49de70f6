"""A portable file as a remote: what it holds, what `tar` says of it, and how it comes to be."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.archive import (
    BLOCK,
    MAX_SIZE,
    members,
    pack_header,
)
from kvsnap.formats.errors import Damaged, NotFound, PartlyDone, RemoteError, Unsupported
from kvsnap.kvstore.remotes.archive import Archive, NewArchive
from kvsnap.kvstore.remotes.base import Entry, Object, Remote
from kvsnap.testing.faults import failing
from kvsnap.testing.remote_suite import RemoteSuite

KEYS = {
    "manifests/t/name.safetensors": b"manifest",
    "blocks/ab/" + "a" * 64 + ".safetensors": os.urandom(3000),
    "blocks/ab/empty": b"",
    "blocks/ab/whole-block": bytes(BLOCK),
    "/".join(["k" * 102] * 5)[:512]: b"the longest name",
    "m/" + "n" * 98: b"exactly 100",
    "m/" + "n" * 99: b"101",
    "p" * 155 + "/" + "n" * 100: b"all of ustar's name",
    "p" * 156 + "/" + "n" * 100: b"one more",
}
MEGABYTE = 1 << 20


def write(path: Path, files: dict[str, bytes] = KEYS) -> Path:
    with Archive.create(path) as archive:
        for key, data in files.items():
            archive.put(key, data)
    return path


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


class Anew(Remote):
    """Opens the archive for each operation: the suite stores objects after it opened a remote."""

    abilities = Archive.abilities

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = str(path)

    def get(self, key: str, limit: int) -> Object:
        with Archive.open(self.path) as archive:
            return archive.get(key, limit)

    def get_start(self, key: str, count: int) -> bytes:
        with Archive.open(self.path) as archive:
            return archive.get_start(key, count)

    def size(self, key: str) -> int | None:
        with Archive.open(self.path) as archive:
            return archive.size(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        with Archive.open(self.path) as archive:
            yield from archive.list(prefix)

    def put(self, key: str, data: bytes) -> None:
        with Archive.open(self.path) as archive:
            archive.put(key, data)

    def replace(self, key: str, data: bytes, version: str | None) -> bool:
        with Archive.open(self.path) as archive:
            return archive.replace(key, data, version)

    def delete(self, key: str) -> None:
        with Archive.open(self.path) as archive:
            archive.delete(key)


class TestArchive(RemoteSuite):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path / "out.kvsnap"
        self.files: dict[str, bytes] = {}
        write(self.path, self.files)

    def make(self) -> Remote:
        return Anew(self.path)

    def seed(self, key: str, data: bytes) -> None:
        self.files[key] = data
        write(self.path, self.files)


def test_what_was_put_is_read(tmp_path):
    with Archive.open(write(tmp_path / "a")) as archive:
        assert {entry.key: entry.size for entry in archive.list("")} == {
            key: len(data) for key, data in KEYS.items()
        }
        assert [entry.key for entry in archive.list("")] == list(KEYS)
        for key, data in KEYS.items():
            assert archive.get(key, 5000).data == data


@pytest.mark.parametrize("program", ["tar", "bsdtar"])
def test_tar_lists_and_unpacks_it(tmp_path, program):
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} on this machine")
    path = write(tmp_path / "a")
    command = [program, "tf", str(path)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (listed.stdout.splitlines(), listed.stderr) == (list(KEYS), "")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run([program, "xf", str(path), "-C", str(unpacked)], check=True)
    assert {key: (unpacked / key).read_bytes() for key in KEYS} == KEYS


def test_pythons_tarfile_finds_the_same(tmp_path):
    path = write(tmp_path / "a")
    data = path.read_bytes()
    with tarfile.open(path) as tar:
        found = {member.name: member for member in tar}
    for member in members(lambda at, count: data[at : at + count], len(data)):
        other = found.pop(member.name)
        assert (member.start, member.size) == (other.offset_data, other.size)
        assert (other.mode, other.uid, other.gid, other.mtime) == (0o644, 0, 0, 0)
        assert (other.uname, other.gname, other.isfile()) == ("", "", True)
    assert not found


def test_equal_puts_are_equal_bytes(tmp_path):
    assert write(tmp_path / "a").read_bytes() == write(tmp_path / "b").read_bytes()


def test_many_threads_write_and_read_it_at_once(tmp_path):
    files = {f"blocks/{n:02x}/x": os.urandom(n * 700) for n in range(40)}

    def all_of(work: Callable[[str], object]) -> None:
        threads = [threading.Thread(target=work, args=(key,)) for key in files]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with Archive.create(tmp_path / "a") as new:
        all_of(lambda key: new.put(key, files[key]))
        assert {key: new.get(key, 10**5).data for key in files} == files
    read: dict[str, bytes] = {}
    with Archive.open(tmp_path / "a") as archive:
        all_of(lambda key: read.update({key: archive.get(key, 10**5).data}))
    assert read == files


def test_a_new_archive_takes_each_file_once(tmp_path):
    with Archive.create(tmp_path / "a") as archive:
        archive.put("a", b"first")
        archive.put("a", bytearray(b"first"))
        for other in (b"other", b"longer than first", b""):
            with pytest.raises(Unsupported):
                archive.put("a", other)
        assert archive.replace("b", b"new", None)
        assert not archive.replace("b", b"newer", None)
        assert not archive.replace("b", b"newer", "no version")
        archive.delete("none")
        with pytest.raises(Unsupported):
            archive.delete("a")
        assert archive.size("b") == 3
    with Archive.open(tmp_path / "a") as archive:
        assert [entry.key for entry in archive.list("")] == ["a", "b"]


def test_it_takes_its_place_when_it_is_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"an older one")
    archive = Archive.create(path)
    archive.put("a", b"x")
    assert path.read_bytes() == b"an older one"
    archive.close()
    archive.close()
    assert Archive.open(path).get("a", 1).data == b"x"
    assert (path.stat().st_mode & 0o777, files_in(tmp_path)) == (0o600, ["a"])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path, error):
    def fail() -> None:
        with Archive.create(tmp_path / "a") as archive:
            archive.put("a", b"x")
            raise error

    with pytest.raises(error):
        fail()
    assert files_in(tmp_path) == []


def test_what_is_partly_done_is_kept(tmp_path):
    def partly() -> None:
        with Archive.create(tmp_path / "a") as archive:
            archive.put("a", b"x")
            raise PartlyDone("some blocks are gone")

    with pytest.raises(PartlyDone):
        partly()
    assert files_in(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace", "ftruncate", "pwrite"])
def test_a_failure_at_the_end_leaves_what_was_there(tmp_path, call):
    path = write(tmp_path / "a")
    before = path.read_bytes()
    archive = Archive.create(path)
    archive.put("a", b"x")
    with failing(call, error=errno.ENOSPC), pytest.raises(RemoteError, match="No space left"):
        archive.close()
    assert (files_in(tmp_path), path.read_bytes()) == (["a"], before)


def test_a_put_that_fails_on_its_way_leaves_no_trace(tmp_path):
    with Archive.create(tmp_path / "a") as archive:
        archive.put("a", b"x")
        for after in range(3):
            with (
                failing("pwrite", error=errno.ENOSPC, after=after),
                pytest.raises(RemoteError, match="No space left"),
            ):
                archive.put("b", b"long " * 1000)
        assert archive.size("b") is None
        archive.put("c", b"y")
    write(tmp_path / "b", {"a": b"x", "c": b"y"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_places_that_cannot_be_are_told(tmp_path):
    with pytest.raises(RemoteError, match="no such folder"):
        Archive.create(tmp_path / "none" / "a")
    with pytest.raises(NotFound, match="there is no"):
        Archive.open(tmp_path / "a")
    for foreign in (tmp_path, Path("/dev/zero")):
        with pytest.raises(Damaged, match="no regular file"):
            Archive.open(foreign)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(Damaged, match="no regular file"):
        Archive.open(tmp_path / "fifo")


def test_sizes_and_numbers_that_an_archive_cannot_hold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("kvsnap.kvstore.remotes.archive.MAX_SIZE", 10)
    monkeypatch.setattr("kvsnap.kvstore.remotes.archive.MAX_MEMBERS", 2)
    with Archive.create(tmp_path / "a") as archive:
        with pytest.raises(RemoteError, match="no room"):
            archive.put("a", bytes(11))
        archive.put("a", b"1")
        archive.put("b", b"2")
        with pytest.raises(RemoteError, match="no room"):
            archive.put("c", b"3")
    with pytest.raises(ValueError, match="a member of"):
        pack_header("a", MAX_SIZE + 1)


def test_a_new_archive_is_an_archive(tmp_path):
    with Archive.create(tmp_path / "a") as archive:
        assert isinstance(archive, NewArchive)
        assert archive.url == str(tmp_path / "a")
        assert archive.abilities.write
    with Archive.open(tmp_path / "a") as archive:
        assert list(archive.list("")) == []
