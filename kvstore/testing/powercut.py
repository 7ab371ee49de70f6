"""A disk that forgets what was not synced: what does a store look like after a power cut?

    with ForgetfulDisk(top) as disk:
        with disk.running(stop_at=7):      # counted call 7 is not made: the program ends there
            session.save()
        disk.cut(elsewhere)                # the worst tree that the next start may find

Durable is a file's content at its last fsync, and a folder's entries (name to file or folder) at
its own last fsync; what stood below `top` at the start is durable too. All else may be lost, and
with `seed` each change by itself may have been written early or not, as disks are free to do.
Functions of the `os` module are patched while the disk runs, so pathlib is seen as well. SQLite's
files are written past them: a cut loses the index or keeps it as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from unittest import mock

INDEX = "index.sqlite3"
"""Names of SQLite's files begin with this. They are never opened here: closing one would let go
of all locks that this process holds on it."""
_PAGE = 4096
_ONE_PATH = ("mkdir", "unlink", "remove", "rmdir")
_TWO_PATHS = ("rename", "replace", "link")
_SYNCS = ("fsync", "fdatasync")
_WRITES = ("write", "writev", "pwrite", "truncate", "ftruncate")
WORST: tuple[dict[str, Any], ...] = tuple(
    {"index": index, "unsynced": unsynced}
    for index in ("lost", "kept")
    for unsynced in ("empty", "short", "zeros", "torn")
)
"""Options of `ForgetfulDisk.cut` for all that may be left where nothing was written early."""
_Unsynced = Literal["empty", "short", "zeros", "torn"]


class PowerCut(BaseException):
    """The program ends here. No `Exception`: nothing that handles errors may go on after it."""


@dataclass
class _Node:
    """A file or folder by its inode. `handle` keeps the inode's number from being used again, and
    reads a file that has lost its name."""

    handle: int
    mode: int
    content: bytes | None = None
    """A file's bytes at its last fsync; None where there was none."""
    entries: dict[str, _Node] = field(default_factory=dict)
    """A folder's entries at its last fsync."""
    changes: list[tuple[str, _Node | None]] = field(default_factory=list)
    """What happened to a folder's entries since; None: removed."""

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


class ForgetfulDisk:
    """Everything below `top`. Threads may use it at once; the calls are made one by one."""

    def __init__(self, top: Path) -> None:
        self.top = str(top.absolute())
        self.calls: list[str] = []
        """The counted calls of the last run, as "function path": those that make a file or an
        entry, take one away, or sync."""
        self.stopped = False
        """Whether the last run ended at a cut; from then on every change raises `PowerCut`."""
        self._stop_at: int | None = None
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._real: dict[str, Callable[..., Any]] = {}
        self._lock = threading.RLock()
        for name in ("open", *_ONE_PATH, *_TWO_PATHS, *_SYNCS, *_WRITES):
            if hasattr(os, name):
                self._real[name] = getattr(os, name)

    def __enter__(self) -> Self:
        node = self._at(self.top)
        assert node is not None, f"{self.top} is not there"
        self._sync_all(node)
        return self

    def __exit__(self, *exc: object) -> None:
        for node in self._nodes.values():
            os.close(node.handle)
        self._nodes.clear()

    @contextlib.contextmanager
    def running(self, stop_at: int | None = None) -> Iterator[None]:
        """Let the program run, and end it in place of counted call `stop_at`.

        What it wrote stays for the next run, as after a kill; only `cut` forgets.
        """
        self.calls, self.stopped, self._stop_at = [], False, stop_at
        with contextlib.ExitStack() as stack:
            for name in self._real:
                stack.enter_context(mock.patch.object(os, name, self._patched(name)))
            try:
                yield
            except PowerCut:
                assert self.stopped

    def cut(
        self,
        target: Path,
        *,
        index: Literal["lost", "kept"] = "lost",
        unsynced: _Unsynced = "empty",
        seed: int | None = None,
    ) -> Path:
        """Make the tree that a power cut leaves, as `target`; returns it.

        A file whose entry is durable and whose content never was is empty, cut short, or of its
        full length with zeros, all over or from the middle on ("torn"). With `seed`, every entry that changed since its folder was synced
        is, by chance, as it was then or as any of the changes made it, and contents likewise.
        Only between runs. The index is taken as it is now: close the stores of this process first.
        """
        self._make(self._nodes[_key(Path(self.top).stat())], target, ".", unsynced, seed)
        if index == "kept":
            for path in Path(self.top).rglob(f"{INDEX}*"):
                copy = target / path.relative_to(self.top)
                if copy.parent.is_dir():
                    shutil.copy(path, copy)
        return target

    def _patched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                paths = self._paths(name, args, kwargs)
                counted = bool(paths) and _matters(name, args, paths[0])
                if paths:
                    self._count(f"{name} {os.path.relpath(paths[0], self.top)}", counted)
                result = real(*args, **kwargs)
                if counted and name in _SYNCS:
                    self._sync(self._nodes[_key(os.fstat(args[0]))])
                elif counted:
                    for path in paths:
                        self._changed(path)
                return result

        return call

    def _paths(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> list[str]:
        """The paths below the top that a call is about; none for other people's calls."""
        if name in _WRITES and not self.stopped:
            return []
        if isinstance(args[0], int):
            path = self._path_of(args[0])
            return [path] if path else []
        if any(options.get(key) is not None for key in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            return []  # the next sync of the folder finds out
        given = args[:2] if name in _TWO_PATHS else args[:1]
        paths = [os.path.abspath(os.fsdecode(path)) for path in given]  # noqa: PTH100
        return [path for path in paths if path == self.top or self._below(path)]

    def _below(self, path: str) -> bool:
        return path.startswith(self.top + os.sep) and not Path(path).name.startswith(INDEX)

    def _count(self, call: str, counted: bool) -> None:
        if not self.stopped and counted:
            self.stopped = len(self.calls) == self._stop_at
            self.calls.append(call)
        if self.stopped:
            raise PowerCut(call)

    def _path_of(self, handle: int) -> str | None:
        """Where the file behind a handle stands now; its folder need not have been seen yet."""
        key = _key(os.fstat(handle))
        if key == _key(Path(self.top).stat()):
            return self.top
        for folder, folders, names in os.walk(self.top):
            for name in (*folders, *names):
                path = os.path.join(folder, name)  # noqa: PTH118
                with contextlib.suppress(FileNotFoundError):  # it went while we were walking
                    if self._below(path) and _key(os.lstat(path)) == key:
                        self._at(path)
                        return path
        return None

    def _at(self, path: str, folder: int | None = None) -> _Node | None:
        """The node that stands at a path now, or at a name in an open folder."""
        try:
            status = os.stat(path, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        node = self._nodes.get(_key(status))
        if node is None:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = self._real["open"](path, flags, dir_fd=folder)
            node = self._nodes[_key(status)] = _Node(handle, status.st_mode)
        return node

    def _listing(self, folder: _Node) -> dict[str, _Node]:
        found_names = os.listdir(folder.handle)  # noqa: PTH208 - it may have lost its path
        names = [name for name in found_names if not name.startswith(INDEX)]
        found = {name: self._at(name, folder.handle) for name in sorted(names)}
        return {name: node for name, node in found.items() if node is not None}

    def _changed(self, path: str) -> None:
        folder = self._at(os.path.dirname(path))  # noqa: PTH120
        if folder is not None and self._below(path):
            folder.changes.append((Path(path).name, self._at(path)))

    def _sync(self, node: _Node) -> None:
        if node.is_folder:
            node.entries, node.changes = self._listing(node), []
        else:
            node.content = _read(node)

    def _sync_all(self, node: _Node) -> None:
        self._sync(node)
        for child in node.entries.values():
            self._sync_all(child)

    def _make(
        self, node: _Node, path: Path, place: str, unsynced: _Unsynced, seed: int | None
    ) -> None:
        # One chance a place: names of temporary files are random and must not change the others'.
        chance = None if seed is None else random.Random(f"{seed} {place}")
        if not node.is_folder:
            path.write_bytes(_survivor(node, unsynced, chance))
        else:
            path.mkdir()
            for name, child in _entries(node, self._listing(node), chance).items():
                self._make(child, path / name, f"{place}/{name}", unsynced, seed)
        path.chmod(stat.S_IMODE(node.mode))


def every_cut(
    folder: Path,
    program: Callable[[Path], object],
    *,
    before: Callable[[Path], object] = lambda top: None,
    then: Callable[[Path], object] | None = None,
    kinds: Sequence[dict[str, Any]] = WORST,
) -> Iterator[tuple[Path, bool]]:
    """Cut at every call of `program`: (the tree that is left, whether the program got through).

    Each time anew in an empty folder, which is what `program` and `before`, which goes first, get.
    With `then` the program is killed at the call instead, and the cut comes after `then`. Every
    second one of `kinds` is tried at a call, the others at the next, and all after the last.
    """
    for stop_at in itertools.count():
        top = folder / str(stop_at)
        top.mkdir()
        with ForgetfulDisk(top) as disk:
            with disk.running():
                before(top)
            with disk.running(stop_at):
                program(top)
            through = not disk.stopped
            if then is not None:
                with disk.running():
                    then(top)
            for number, kind in enumerate(kinds if through else kinds[stop_at % 2 :: 2]):
                yield disk.cut(folder / f"{stop_at}-{number}", **kind), through
        if through:
            return


def _matters(name: str, args: tuple[Any, ...], path: str) -> bool:
    """Whether a call syncs, or makes or removes an entry; a folder that is there is not made."""
    if name == "open" and not args[1] & os.O_CREAT:
        return False
    return name in _SYNCS or os.path.lexists(path) == (name not in ("open", "mkdir"))


def _entries(
    folder: _Node, now: dict[str, _Node], chance: random.Random | None
) -> dict[str, _Node]:
    if chance is None:
        return folder.entries
    names: dict[str, list[_Node | None]] = {}
    for name, node in (*folder.changes, *now.items()):
        names.setdefault(name, [folder.entries.get(name)]).append(node)
    chosen = {**folder.entries, **{name: chance.choice(names[name]) for name in sorted(names)}}
    return {name: node for name, node in chosen.items() if node is not None}


def _survivor(file: _Node, unsynced: _Unsynced, chance: random.Random | None) -> bytes:
    """The bytes of a file after the cut."""
    now = _read(file)
    if file.content == now:
        return now
    half = now[: len(now) // 2]
    lost = {
        "empty": b"",
        "short": half,
        "zeros": bytes(len(now)),
        "torn": half + bytes(len(now) - len(half)),
    }
    before = lost[unsynced] if file.content is None else file.content
    if chance is None:
        return before
    pages = [now[at : at + _PAGE] for at in range(0, len(now), _PAGE)]
    mixed = b"".join(page if chance.random() < 0.5 else bytes(len(page)) for page in pages)
    return chance.choice(
        [before, *lost.values(), now[: chance.randrange(len(now) + 1)], mixed, now]
    )


def _read(file: _Node) -> bytes:
    return os.pread(file.handle, os.fstat(file.handle).st_size, 0)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
