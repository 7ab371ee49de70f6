"""A folder as a remote: who may read it, what stands in the way, and writers that die."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.errors import (
    Damaged,
    KvsnapError,
    NotFound,
    RemoteDenied,
    RemoteDown,
    RemoteError,
    UsageError,
)
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.folder import STALE, Folder
from kvsnap.testing.remote_suite import RemoteSuite

KEY = "blocks/ab/x"


class TestFolder(RemoteSuite):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.root = tmp_path / "not made yet" / "kv"

    def make(self) -> Remote:
        return Folder(self.root.as_uri(), timeout=20)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def remote(root: Path) -> Folder:
    return Folder(root.as_uri(), timeout=5)


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def everything(remote: Remote, key: str) -> list[Callable[[], object]]:
    return [
        lambda: remote.get(key, 100),
        lambda: remote.get_start(key, 10),
        lambda: remote.size(key),
        lambda: remote.put(key, b"new"),
        lambda: remote.replace(key, b"new", None),
        lambda: remote.delete(key),
        lambda: list(remote.list(key.rpartition("/")[0] + "/")),
    ]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if not path.is_dir()}


def test_reading_makes_nothing(remote: Folder, root: Path) -> None:
    assert remote.size(KEY) is None
    assert list(remote.list("")) == []
    remote.delete(KEY)
    with pytest.raises(NotFound):
        remote.get(KEY, 10)
    assert not root.exists()


def test_a_link_in_an_objects_place_is_not_followed(remote: Folder, root: Path) -> None:
    secret = root.parent / "secret"
    secret.write_bytes(b"secret")
    (root / "blocks/ab").mkdir(parents=True)
    (root / KEY).symlink_to(secret)
    for read in (lambda: remote.get(KEY, 100), lambda: remote.get_start(KEY, 10)):
        with pytest.raises(Damaged, match="symbolic link"):
            read()
    assert remote.size(KEY) is None
    assert list(remote.list("")) == []
    remote.put(KEY, b"ours")
    assert remote.get(KEY, 10).data == b"ours"
    assert secret.read_bytes() == b"secret"


@pytest.mark.parametrize("part", ["blocks", "blocks/ab"])
def test_a_link_on_the_way_is_not_followed(remote: Folder, root: Path, part: str) -> None:
    outside = root.parent / "outside"
    (outside / "ab").mkdir(parents=True)
    for path in (outside / "x", outside / "ab/x"):
        path.write_bytes(b"secret")
    (root / part).parent.mkdir(parents=True)
    (root / part).symlink_to(outside, target_is_directory=True)
    before = sorted(outside.rglob("*"))
    for operation in everything(remote, KEY):
        with pytest.raises(RemoteError, match="symbolic link") as raised:
            operation()
        assert raised.value.hint
    assert list(remote.list("")) == []
    assert sorted(outside.rglob("*")) == before
    assert (outside / "x").read_bytes() == (outside / "ab/x").read_bytes() == b"secret"


def test_a_links_lock_and_temporary_file_are_not_written_through(
    remote: Folder, root: Path
) -> None:
    target = root.parent / "target"
    root.mkdir()
    (root / "lock+").symlink_to(target)
    with pytest.raises(RemoteError):
        remote.replace("x", b"new", None)
    assert not target.exists()


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "real")
    remote = Folder((tmp_path / "kv").as_uri(), timeout=5)
    remote.put(KEY, b"x")
    assert (tmp_path / "real" / KEY).read_bytes() == b"x"


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder"])
def test_what_is_no_file_is_refused_at_once(remote: Folder, root: Path, kind: str) -> None:
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "fifo":
            os.mkfifo(root / "x")
        elif kind == "folder":
            (root / "x").mkdir()
        else:
            here = Path.cwd()
            os.chdir(root)  # the path of a socket may have 107 bytes
            listening.bind("x")
            os.chdir(here)
        with pytest.raises((Damaged, RemoteError)) as raised:
            remote.get("x", 100)
        assert not isinstance(raised.value, RemoteDown)
        assert remote.size("x") is None
        assert list(remote.list("")) == []


def test_a_file_where_a_folder_must_be(remote: Folder) -> None:
    remote.put("blocks", b"x")
    assert remote.size(KEY) is None
    with pytest.raises(NotFound):
        remote.get(KEY, 10)
    with pytest.raises(RemoteError, match="a file stands on the way"):
        remote.put(KEY, b"x")
    assert remote.get("blocks", 10).data == b"x"


def test_names_that_are_no_keys_are_left_out(remote: Folder, root: Path) -> None:
    remote.put(KEY, b"x")
    for name in ("UPPER", "a b", ".nfs+0001", "tmp+1234", "lock+", "ä", "new\nline"):
        (root / name).write_bytes(b"?")
    deep = root / "a/b/c/d/e"
    deep.mkdir(parents=True)
    (deep / "f").write_bytes(b"?")
    (root / os.fsdecode(b"\xff\xfe")).mkdir()
    assert [entry.key for entry in remote.list("")] == [KEY]


def test_a_sparse_file_of_terabytes_is_refused(remote: Folder, root: Path) -> None:
    root.mkdir()
    with (root / "x").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(Damaged):
        remote.get("x", 2**20)
    assert remote.get_start("x", 8) == bytes(8)


@pytest.mark.parametrize(
    ("mask", "file", "folder"),
    [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)],
)
def test_modes_follow_the_umask(
    remote: Folder, root: Path, umask: Callable[[int], int], mask: int, file: int, folder: int
) -> None:
    umask(mask)
    remote.put(KEY, b"x")
    assert stat.S_IMODE((root / KEY).stat().st_mode) == file
    assert stat.S_IMODE((root / "blocks/ab").stat().st_mode) == folder


def test_a_setgid_folder_is_shared_with_its_group(
    remote: Folder, root: Path, umask: Callable[[int], int]
) -> None:
    umask(0o077)
    root.mkdir()
    root.chmod(0o2770)
    remote.put(KEY, b"x")
    assert remote.replace("manifests/m", b"x", None)
    for path in (root / "blocks", root / "blocks/ab"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o2770
    for path in (root / KEY, root / "manifests/m", root / "manifests/lock+"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, RemoteError, "free some space"),
        (errno.EDQUOT, RemoteError, "free some space"),
        (errno.EACCES, RemoteDenied, "owner"),
        (errno.EROFS, RemoteDenied, "writable"),
        (errno.EIO, RemoteDown, "disk"),
        (errno.ESTALE, RemoteDown, "network"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_write_that_fails_says_what_to_do_and_leaves_nothing(
    remote: Folder,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[RemoteError],
    hint: str,
    call: str,
) -> None:
    remote.put(KEY, b"before")

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(RemoteError, match=os.strerror(number)) as raised:
        remote.put(KEY, b"after")
    monkeypatch.undo()
    assert type(raised.value) is kind
    assert hint in raised.value.hint
    assert remote.get(KEY, 10).data == b"before"
    assert names(root) == {"x"}


def test_a_closed_folder_is_denied_and_not_empty(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs to become another user")
    remote = Folder(root.as_uri(), timeout=5)
    remote.put(KEY, b"x")
    root.chmod(0o700)
    os.seteuid(65534)
    try:
        found = [_error(operation) for operation in everything(remote, KEY)]
    finally:
        os.seteuid(0)
    assert [type(error) for error in found] == [RemoteDenied] * 7


def _error(operation: Callable[[], object]) -> KvsnapError | None:
    try:
        operation()
    except KvsnapError as error:
        return error
    return None


def test_data_reaches_the_device_before_its_name(
    remote: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("blocks/ab/other", b"x")
    calls: list[str] = []
    fsync, rename = os.fsync, os.replace

    def sync(handle: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *a, **k: (calls.append("rename"), rename(*a, **k)))
    remote.put(KEY, b"x")
    assert calls == ["file", "rename", "folder"]


KILLED = """
import os, signal, sys
from kvsnap.kvstore.remotes.folder import Folder
os.replace = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
Folder(sys.argv[1], 5).put("blocks/ab/x", b"half" * 1000)
"""


def test_a_killed_writer_leaves_the_old_object_and_its_rest_is_removed_later(
    remote: Folder, root: Path
) -> None:
    remote.put(KEY, b"before")
    done = subprocess.run([sys.executable, "-c", KILLED, root.as_uri()], check=False, timeout=60)
    assert done.returncode == -9
    (rest,) = (root / "blocks/ab").glob("tmp+*")
    assert [entry.key for entry in remote.list("")] == [KEY]
    assert remote.get(KEY, 10).data == b"before"
    Folder(root.as_uri(), timeout=5).put("blocks/ab/y", b"y")
    assert rest.exists(), "it may belong to a writer that is at work"
    old = time.time() - STALE - 60
    os.utime(rest, (old, old))
    Folder(root.as_uri(), timeout=5).put("blocks/ab/y", b"y")
    assert names(root) == {"x", "y"}


def test_a_lock_that_is_held_ends_in_a_timeout(root: Path) -> None:
    remote = Folder(root.as_uri(), timeout=0.2)
    remote.put("manifests/m", b"x")
    with (root / "manifests/lock+").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(RemoteDown, match="lock"):
            remote.replace("manifests/m", b"y", None)
    assert remote.replace("manifests/n", b"y", None)


COUNTER = """
import sys
from kvsnap.kvstore.remotes.folder import Folder
remote, left = Folder(sys.argv[1], 60), 25
while left:
    found = remote.get("manifests/count", 100)
    left -= remote.replace("manifests/count", b"%d" % (int(found.data) + 1), found.version)
"""


def test_processes_that_count_together_lose_nothing(remote: Folder, root: Path) -> None:
    remote.put("manifests/count", b"0")
    command = [sys.executable, "-W", "error", "-c", COUNTER, root.as_uri()]
    counting = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(120) for process in counting] == [0, 0, 0]
    assert remote.get("manifests/count", 100).data == b"75"


@pytest.mark.parametrize(
    "url",
    ["file://host/kv", "file:kv", "file://", "file:///kv%00", "file:///kv?a=b", "file:///kv#a"],
)
def test_urls_that_name_no_folder_of_this_machine(url: str) -> None:
    with pytest.raises(UsageError) as raised:
        Folder(url, timeout=5)
    assert raised.value.hint


def test_a_path_is_unquoted(tmp_path: Path) -> None:
    path = tmp_path / "a b#c?d%20ä"
    Folder(path.as_uri(), timeout=5).put("x", b"x")
    Folder(path.as_uri().replace("file://", "file://localhost"), timeout=5).put("y", b"y")
    assert names(path) == {"x", "y"}
