"""After a power cut, at any moment, what was reported saved is there to the last token."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvsnap.formats.errors import KvsnapError, SessionMoved, StoreError
from kvsnap.formats.names import TokenIds, token_array
from kvsnap.kvstore import files
from kvsnap.kvstore.place import Place, change_settings, read_settings
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing import aftermath
from kvsnap.testing.aftermath import computed
from kvsnap.testing.calls import Fault, watching
from kvsnap.testing.powercut import WORST, ForgetfulDisk, every_cut
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

IDS = some_ids(52)
LONGER = np.concatenate([IDS[:40], some_ids(31, seed=1)])
"""Parts with `IDS` in the third block, so that a session that it replaces shares its front."""
CHANCES = [{"index": index, "seed": seed} for index in ("lost", "kept") for seed in range(12)]
ALL = (*WORST, *CHANCES)
FEW = [*WORST, *CHANCES[:2], *CHANCES[12:14]]
"""For sweeps, which try every second one at each call."""
Cuts = Callable[..., Iterator[Path]]


@pytest.fixture
def disk(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForgetfulDisk]:
    """The disk with `store_path`, a store with blocks of 16 that nothing was written to yet."""
    monkeypatch.setattr(files, "SYNC_THREADS", 1)  # the calls come in the same order every time
    with ForgetfulDisk(store_path.parent) as disk:
        yield disk


@pytest.fixture
def cuts(disk: ForgetfulDisk, tmp_path_factory: pytest.TempPathFactory) -> Cuts:
    """The stores that different cuts at this moment leave."""
    folder, number = tmp_path_factory.mktemp("cuts"), itertools.count()

    def stores(kinds: Sequence[dict] = ALL, place: str = "store") -> Iterator[Path]:
        for kind in kinds:
            yield disk.cut(folder / str(next(number)), **kind) / place

    return stores


def assert_saved(path: Path, ids: TokenIds, name: str, *, clean: bool = False) -> None:
    with Store(path) as store:
        aftermath.assert_saved(store, ids, name)
        if clean:
            aftermath.assert_clean(store)


def stored_ids(path: Path, name: str) -> list[int] | None:
    with Store(path) as store:
        return aftermath.stored_ids(store, name)


def save(path: Path, ids: TokenIds, name: str) -> None:
    with computed(path, ids, name) as session:
        session.save()


def put(path: Path, ids: TokenIds) -> None:
    """Blocks that a long prefill stores on its way, unsynced."""
    with computed(path, ids) as session:
        session.put_filled()


def forget_index(path: Path) -> None:
    for file in path.glob("index.sqlite3*"):
        file.unlink()


def sweep(folder: Path, *programs: Callable[[Path], object], **options: Any) -> Iterator[Any]:
    """`every_cut` of a program on a store, after one that prepares it, before one that follows."""
    prepare, program, *then = [lambda top, run=run: run(top / "store") for run in programs]
    options = {"before": prepare, "then": then[0] if then else None, "kinds": FEW} | options
    for path, through in every_cut(folder, program, **options):
        yield path / "store", through


@contextlib.contextmanager
def losing_the_first_sync() -> Iterator[None]:
    """The first file that is synced fails; later syncs of it succeed and bring nothing."""
    real, lost = os.fsync, list[int]()

    def fsync(handle: int) -> None:
        status = os.fstat(handle)
        if not lost and stat.S_ISREG(status.st_mode):
            lost.append(status.st_ino)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if status.st_ino not in lost:
            real(handle)

    with mock.patch.object(os, "fsync", fsync):
        yield
    assert lost


def empty(path: Path) -> None:
    """A store with blocks of 16, as the fixture makes it."""
    path.mkdir(mode=0o700)
    (path / "kvsnap.json").write_text('{"block_size": 16, "created": 1, "format": "1"}')
    files.sync_all([path / "kvsnap.json", path, path.parent])


def saved(path: Path) -> None:
    empty(path)
    save(path, IDS, "chat")


def test_a_reported_save_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path
) -> None:
    with disk.running():
        save(store_path, IDS, "chat")
    for path in cuts():
        assert_saved(path, IDS, "chat", clean=True)


def test_the_first_save_of_a_new_store_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, tmp_path: Path
) -> None:
    ids = some_ids(150)  # blocks of 64 here
    with disk.running():
        save(tmp_path / "new", ids, "chat")
    for path in cuts(place="new"):
        assert_saved(path, ids, "chat")


def test_the_first_save_of_a_store_below_new_folders_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, tmp_path: Path
) -> None:
    ids = some_ids(150)
    with disk.running():
        save(tmp_path / "new" / "deep" / "store", ids, "chat")
    for path in cuts(place="new/deep/store"):
        assert_saved(path, ids, "chat")


def test_blocks_that_another_session_left_unsynced_are_synced_by_the_save_that_needs_them(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path
) -> None:
    with disk.running():
        put(store_path, IDS)
        save(store_path, IDS, "chat")
    for path in cuts():
        assert_saved(path, IDS, "chat")


@pytest.mark.parametrize("before", ["put", "saved"])
def test_a_save_after_the_index_was_built_anew_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path, before: str
) -> None:
    with disk.running():
        put(store_path, LONGER) if before == "put" else save(store_path, LONGER, "other")
        forget_index(store_path)
        save(store_path, IDS, "chat")
    for path in cuts():
        assert_saved(path, IDS, "chat")
        if before == "saved":
            assert_saved(path, LONGER, "other")


def test_durable_blocks_that_an_older_index_does_not_know_are_put_again_without_risk(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path
) -> None:
    """A cut may take the index's last commits: it then has no row for files that are there."""
    index = store_path / "index.sqlite3"
    with disk.running():
        put(store_path, some_ids(20, seed=9))
        before = index.read_bytes()
        save(store_path, IDS, "chat")
        forget_index(store_path)
        index.write_bytes(before)
        put(store_path, IDS)
    for path in cuts():
        assert_saved(path, IDS, "chat")


def test_a_save_beside_one_that_moved_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path
) -> None:
    with disk.running(), computed(store_path, IDS, "chat") as late:
        save(store_path, LONGER, "chat")
        with pytest.raises(SessionMoved) as moved:
            late.save()
    for path in cuts():
        assert_saved(path, LONGER, "chat")
        assert_saved(path, IDS, moved.value.stored_as)


@pytest.mark.parametrize("before", [0, 1], ids=["all blocks", "all but the first"])
def test_blocks_that_a_cut_tore_are_written_again_by_a_save_that_never_read_them(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path, before: int
) -> None:
    with disk.running():
        put(store_path, IDS)
        blocks = sorted(store_path.glob("blocks/*/*"), key=lambda path: path.stat().st_mtime_ns)
        for path in blocks[:before]:
            path.unlink()
        files.sync_all([*{path.parent for path in blocks}, store_path / "blocks", store_path])
    for path in cuts():
        save(path, IDS, "chat")
        assert_saved(path, IDS, "chat", clean=True)


def test_a_save_that_is_repeated_after_a_failed_sync_is_complete_after_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SYNC_THREADS", 1)
    ids = some_ids(150)
    for number in itertools.count():
        top = tmp_path / str(number)
        top.mkdir()
        with ForgetfulDisk(top) as disk:
            with disk.running(), computed(top / "store", ids, "chat") as session:
                fault = Fault(number, errno.EIO, only=("fsync",))
                with watching(top, fault) as calls, contextlib.suppress(KvsnapError):
                    session.save()
                if calls.failed:
                    session.save()
            for count, kind in enumerate(WORST):
                path = disk.cut(tmp_path / f"{number}-{count}", **kind)
                assert_saved(path / "store", ids, "chat")
        if not calls.failed:
            assert number > 8
            return


@pytest.mark.parametrize("writer", ["the session itself", "another one", "another process"])
def test_a_file_whose_sync_failed_is_not_believed_when_a_later_sync_succeeds(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path, writer: str
) -> None:
    """The kernel may drop what it could not write and call the file clean from then on."""
    with disk.running():
        if writer == "another process":
            put(store_path, IDS)
        with computed(store_path, IDS, "chat") as session:
            if writer == "another one":
                Session(session.store, session.engine).put_filled()
            with losing_the_first_sync():
                with pytest.raises(StoreError):
                    session.save()
                session.save()
    for path in cuts(WORST):
        assert_saved(path, IDS, "chat")


def test_a_cut_while_a_setting_is_changed_leaves_the_old_settings_or_the_new_ones(
    tmp_path: Path,
) -> None:
    def change(path: Path) -> None:
        change_settings(Place(path), "capacity", lambda old: "1GB")

    found = set()
    for path, through in sweep(tmp_path, saved, change, kinds=ALL):
        settings = read_settings(Place(path))
        assert (settings.problem, settings.block_size) == ("", 16)
        found.add((settings.capacity, through))
        assert_saved(path, IDS, "chat")
    assert found == {(None, False), ("1GB", False), ("1GB", True)}


def test_a_cut_at_any_call_of_a_first_save_leaves_all_of_it_or_nothing(tmp_path: Path) -> None:
    ids = some_ids(150)
    outcomes = set()
    for path, through in sweep(tmp_path, lambda path: None, lambda path: save(path, ids, "chat")):
        found = stored_ids(path, "chat")
        outcomes.add((found is not None, through))
        if found is not None:
            assert_saved(path, ids, "chat")
        turn_again(path, ids)
    assert outcomes == {(False, False), (True, False), (True, True)}


def test_a_cut_at_any_call_of_a_second_save_leaves_the_old_session_or_the_new_one(
    tmp_path: Path,
) -> None:
    outcomes = set()
    for path, through in sweep(tmp_path, saved, lambda path: save(path, LONGER, "chat")):
        found = stored_ids(path, "chat")
        kept = IDS if found == IDS.tolist() else LONGER
        assert_saved(path, kept, "chat")
        outcomes.add((len(kept), through))
        turn_again(path, LONGER)
    assert outcomes == {(52, False), (71, False), (71, True)}


def test_a_cut_at_any_call_of_a_save_costs_no_other_session(tmp_path: Path) -> None:
    for path, through in sweep(tmp_path, saved, lambda path: save(path, LONGER, "other")):
        assert_saved(path, IDS, "chat")
        if through:
            assert_saved(path, LONGER, "other")


def test_a_save_after_one_that_was_killed_at_any_call_is_complete_after_a_cut(
    tmp_path: Path,
) -> None:
    def again(path: Path) -> None:
        save(path, LONGER, "other")

    for path, _ in sweep(tmp_path, empty, lambda path: save(path, IDS, "chat"), again):
        assert_saved(path, LONGER, "other")


def test_a_save_after_a_new_store_was_killed_at_any_call_is_complete_after_a_cut(
    tmp_path: Path,
) -> None:
    ids = some_ids(150)

    def again(path: Path) -> None:
        save(path, ids, "other")

    for path, _ in sweep(tmp_path, lambda path: None, again, again):
        assert_saved(path, ids, "other")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happened_before_all_that_was_reported_is_complete_after_a_cut(
    disk: ForgetfulDisk, cuts: Cuts, store_path: Path, seed: int
) -> None:
    """Saves, blocks put on the way, kills and a lost index in any order."""
    chosen = random.Random(seed)
    possible: dict[str, list[list[int] | None]] = {name: [None] for name in "abc"}
    for _ in range(12):
        name = chosen.choice("abc")
        ids = np.concatenate([IDS[: chosen.randrange(20, 52)], some_ids(30, chosen.randrange(3))])
        action = chosen.choice(["save", "save", "put", "killed", "index"])
        with disk.running(chosen.randrange(40) if action == "killed" else None):
            if action in ("save", "killed"):
                save(store_path, ids, name)
            elif action == "put":
                put(store_path, ids)
            else:
                forget_index(store_path)
        if action in ("save", "killed"):
            earlier = possible[name] if disk.stopped else []
            possible[name] = [*earlier, ids.tolist()]
    for path in cuts(FEW):
        for name, states in possible.items():
            found = stored_ids(path, name)
            assert found in states
            if found is not None:
                assert_saved(path, token_array(found), name)


def turn_again(path: Path, ids: TokenIds) -> None:
    """The conversation goes on after the restart, and all is well again."""
    with Store(path) as store:
        turn(store, StampedEngine(), ids, "chat")
    assert_saved(path, ids, "chat", clean=True)
