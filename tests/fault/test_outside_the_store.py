"""Names and links that lead out of the store: nothing there is read, written or deleted (A69)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvsnap.formats.errors import KvsnapError, StoreError, UsageError
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import rewrite

IDS = some_ids(65)
ME = "default"
DEAD = "0123456789abcdef"
"""A writer that is no more."""
ODD_NAMES = [
    "../x", "../../outside/mine", "/abs", "/etc/passwd", "a/../../b", "..", ".", "./x", "~", "~/x",
    "CON", "con.txt", "nul", "..%2f", "%2e%2e%2fx", "%2e%2e", "C:x", "C:\\x", "\\\\host\\x", "a//b", "x/",
    "-rf", "x.safetensors", "x" * 1000, "ä" * 500,
]  # fmt: skip
NO_NAMES = ["a\0b", "../x\0", "x" * 5000, "", "two\nlines", "\x1b[2J", "\ud800", "a\u202eb"]


def tree(folder: Path) -> dict[str, object]:
    """Path → what stands there: content, mode and time of change, or where a link leads."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        what = os.readlink(path) if path.is_symlink() else "folder"  # noqa: PTH115 - as it is
        if path.is_file() and not path.is_symlink():
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        found[str(path.relative_to(folder))] = (what, status.st_mode, status.st_mtime_ns)
    return found


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Somebody's files beside the store."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("mine", "x", "x.safetensors", "b", "abs"):
        (folder / name).write_text(name)
    return folder


@contextlib.contextmanager
def nothing_is_opened_in(folder: Path) -> Iterator[None]:
    """No file in it is opened, and no folder listed, by whatever path."""
    opened: list[str] = []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **more: Any) -> Any:
            if isinstance(path, str | Path) and "dir_fd" not in more:
                # Where a link is not followed, the folder that it stands in is what is opened.
                follows = name != "open" or not args[0] & os.O_NOFOLLOW
                where = Path(path).resolve() if follows else Path(path).parent.resolve() / "x"
                if where.is_relative_to(folder):
                    opened.append(f"{name} {path}")
            return real(path, *args, **more)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("open", "scandir", "listdir"):
            stack.enter_context(patch.object(os, name, watched(name, getattr(os, name))))
        yield
    assert opened == []


def use(path: Path, *, name: str = "chat", capacity: str | None = None) -> Iterator[object]:
    """Each step is all that somebody may do with a store, one after the other, as new processes."""

    def opened() -> Store:
        return Store(path, capacity=capacity)

    def step(work: Callable[[Store], object]) -> object:
        with opened() as store:
            return work(store)

    yield lambda: step(lambda store: turn(store, StampedEngine(), IDS, name))
    yield lambda: step(lambda store: turn(store, StampedEngine(), some_ids(70, 3), f"{name}-2"))
    yield lambda: step(lambda store: verify_store(store, progress=lambda done, total: None))
    yield lambda: step(lambda store: list(store.listing))
    yield lambda: step(lambda store: store.pins.pin_session(ME, name, None))
    yield lambda: step(lambda store: store.pins.unpin_session(ME, name))
    yield lambda: list(examine(path))
    yield lambda: step(gc)
    yield lambda: step(lambda store: gc(store, dry_run=True))
    yield lambda: step(lambda store: store.sessions.remove(ME, name))


@pytest.fixture
def full(store_path: Path) -> Path:
    """A store with a file in each of its folders, old enough to go."""
    with Store(store_path) as store:
        session = turn(store, StampedEngine(), IDS, "chat").session
        assert session.stored is not None
        store.pins.pin_session(ME, "chat", None)
        store.pins.pin_block(session.stored.record.chain[0], None)
        store.pins.unpin_session(ME, "chat")
    for name in (
        f"tmp/{DEAD}.{DEAD}.part", f"tmp/{DEAD}.owner", "quarantine/ab.safetensors.01234567",
        "quarantine/ab.safetensors.01234567.reason", f"calibrations/{'ab' * 32}.safetensors",
        "pins/default/chat.safetensors", "kvsnap.json.damaged",
    ):  # fmt: skip
        path = store_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
        os.utime(path, (1e9, 1e9))
    return store_path


@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name[:20]))
def test_an_odd_name_is_a_file_in_the_stores_own_folder(
    store_path: Path, outside: Path, tmp_path: Path, name: str
) -> None:
    before = tree(outside)
    with nothing_is_opened_in(outside):
        for step in use(store_path, name=name):
            step()
    assert tree(outside) == before
    assert {path.name for path in tmp_path.iterdir()} == {"store", "outside"}
    (left,) = store_path.glob("sessions/**/*.safetensors")
    assert left.parent == store_path / "sessions" / ME
    with Store(store_path) as store:
        assert store.sessions.load(ME, f"{name}-2").record.name == f"{name}-2"


@pytest.mark.parametrize("name", NO_NAMES, ids=lambda name: ascii(name[:20]))
def test_what_is_no_name_is_refused_before_anything_is_written(
    store_path: Path, outside: Path, tmp_path: Path, name: str
) -> None:
    before, first = tree(outside), tree(store_path)
    with nothing_is_opened_in(outside), Store(store_path) as store:
        for refused in (store.sessions.load, store.sessions.remove, store.pins.pin_session):
            with pytest.raises(UsageError):
                refused(ME, name)
        with pytest.raises(UsageError):
            turn(store, StampedEngine(), IDS, name)
    assert tree(outside) == before
    assert not list(store_path.glob("sessions/*/*"))
    assert first.items() <= tree(store_path).items()


FOLDERS = [
    "blocks", "blocks/*", "sessions", "sessions/*", "pins", "pins/*", "tmp", "quarantine", "calibrations",
]  # fmt: skip
FILES = [
    "blocks/*/*", "sessions/*/*", "pins/*/*", "tmp/*", "quarantine/*", "calibrations/*",
    "kvsnap.json", "kvsnap.json.damaged",
]  # fmt: skip
INDEX = ["index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"]


def lead_outside(store: Path, pattern: str, outside: Path) -> None:
    """What stands there goes outside, among other people's files; a link to it stays."""
    found = sorted(store.glob(pattern)) or [store / pattern]
    for number, path in enumerate(found):
        target = outside / f"{number}" / path.name
        target.parent.mkdir()
        if path.exists():
            path.rename(target)
        else:
            target.write_bytes(b"")
        path.symlink_to(target, target_is_directory=target.is_dir())
        if target.is_dir():
            for name in ("mine", f"{'ab' * 32}.safetensors"):
                (target / name).write_text("mine")


@pytest.mark.parametrize("index", ["with its index", "without"])
@pytest.mark.parametrize("capacity", [None, "1kB"])
@pytest.mark.parametrize("pattern", [*FOLDERS, *FILES, *INDEX])
def test_nothing_outside_is_touched_through_links_in_the_place_of(
    full: Path, outside: Path, pattern: str, capacity: str | None, index: str
) -> None:
    lead_outside(full, pattern, outside)
    if index == "without" and pattern not in INDEX:
        for path in full.glob("index.sqlite3*"):
            path.unlink()
    before = tree(outside)
    with nothing_is_opened_in(outside):
        for step in use(full, capacity=capacity):
            with contextlib.suppress(KvsnapError):
                step()
    assert tree(outside) == before


@pytest.mark.parametrize("pattern", [*FOLDERS, *INDEX])
def test_a_link_in_the_place_of_a_folder_is_refused_by_name(
    full: Path, outside: Path, pattern: str
) -> None:
    lead_outside(full, pattern, outside)
    with pytest.raises(StoreError, match="is a symbolic link") as raised:
        Store(full)
    assert raised.value.hint
    assert any("is a symbolic link" in finding.what for finding in examine(full))


@pytest.mark.parametrize(
    "pattern", ["blocks", "blocks/ab", "sessions/default", "tmp", "quarantine"]
)
def test_nothing_is_made_where_a_link_leads_to_nothing(
    store_path: Path, outside: Path, pattern: str
) -> None:
    (store_path / pattern).parent.mkdir(exist_ok=True)
    (store_path / pattern).symlink_to(outside / "new")
    before = tree(outside)
    for step in use(store_path):
        with contextlib.suppress(KvsnapError):
            step()
    assert tree(outside) == before


def test_the_stores_own_folder_may_be_a_link(full: Path, tmp_path: Path) -> None:
    (tmp_path / "by-link").symlink_to(full, target_is_directory=True)
    engine = StampedEngine()
    with Store(tmp_path / "by-link") as store:
        turn(store, engine, IDS, "chat")
    assert engine.positions == [64]


@pytest.mark.parametrize("name", ["link", "zz", "ABAB", "default.old"])
def test_links_of_other_names_are_no_hindrance(full: Path, outside: Path, name: str) -> None:
    """As all that is not kvsnap's: left alone."""
    for folder in (".", "blocks", "sessions", "tmp", "quarantine"):
        (full / folder / name).symlink_to(outside, target_is_directory=True)
    engine, before = StampedEngine(), tree(outside)
    with nothing_is_opened_in(outside), Store(full) as store:
        turn(store, engine, IDS, "chat")
        gc(store)
    assert engine.positions == [64]
    assert tree(outside) == before


@pytest.mark.parametrize("field", ["name", "tenant_id", "root_id"])
@pytest.mark.parametrize("value", [*ODD_NAMES, *NO_NAMES], ids=lambda value: ascii(value[:20]))
def test_nothing_that_a_manifest_says_leads_outside(
    store_path: Path, outside: Path, tmp_path: Path, field: str, value: str
) -> None:
    there, other = tmp_path / "remote", tmp_path / "other"
    remote = Folder(there.as_uri(), 5.0)
    other.mkdir()
    shutil.copy(store_path / "kvsnap.json", other)
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "x")
        push(store, remote, ME, "x")
    rewrite(there / "manifests" / ME / "x.safetensors", **{field: value})
    before, place = tree(outside), tree(tmp_path).keys()
    with nothing_is_opened_in(outside), Store(other) as store:
        for work in (
            lambda: pull(store, remote, "x"),
            lambda: pull(store, remote, "x", new_name="y", force=True),
            lambda: pull(store, remote, value),
            lambda: verify_remote(remote),
            lambda: sweep(remote, grace_days=0),
            lambda: push(store, remote, ME, "x", force=True),
        ):
            with contextlib.suppress(KvsnapError):
                work()
    assert tree(outside) == before
    new = {path.split("/")[0] for path in tree(tmp_path).keys() - place}
    assert new <= {"other", "remote"}
