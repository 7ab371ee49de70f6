"""One system call of a save fails, whichever: the save is done or refused, and a retry mends all.

All calls that Python makes on the store's files are met, one after the other; SQLite's are not.
"""

from __future__ import annotations

import errno
import itertools
import json
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError
from kvsnap.kvstore import files, restore
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.calls import Fault, watching
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids

ERRORS = [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EBUSY]
NAMES = [errno.errorcode[error] for error in ERRORS]
OLD, NEW = some_ids(20), some_ids(52)
"""Two blocks of `NEW` are not stored yet where `OLD` is; in a new store, with blocks of 64, none."""
NEW_STORE = some_ids(70)
READING = ("open", "fstat", "stat", "lstat", "read", "readv", "pread", "close")
UNREADABLE = Fault(0, errno.EIO, lasting=True, only=("read", "readv", "pread"))
STARTS = ["a new store", "a store with a session"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls come in the same order every time."""
    monkeypatch.setattr(files, "SYNC_THREADS", 1)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which `OLD` was saved."""
    path = tmp_path_factory.mktemp("before") / "store"
    path.mkdir(mode=0o700)
    text = json.dumps({"block_size": 16, "created": 1, "format": "1"})
    (path / "kvsnap.json").write_text(text)
    engine = StampedEngine()
    engine.evaluate(OLD)
    with Store(path) as store:
        Session(store, engine, "old").save()
    return path


class Attempt:
    """One save of `chat` with one fault, in a store of its own."""

    def __init__(self, folder: Path, before: Path | None, fault: Fault) -> None:
        self.path, self.has_old = folder / "store", before is not None
        self.ids = NEW if before is not None else NEW_STORE
        folder.mkdir()
        if before is not None:
            shutil.copytree(before, self.path)
        self.engine = StampedEngine()
        self.engine.evaluate(self.ids)
        self.session: Session | None = None
        self.raised: Exception | None = None
        with watching(folder, fault) as self.calls:
            try:
                self.session = Session(Store(self.path), self.engine, "chat")
                self.session.save()
            except Exception as error:  # noqa: BLE001 - that it is ours is what is tested
                self.raised = error

    def check(self) -> None:
        if self.raised is not None:
            self.check_refusal()
            self.retry()
        assert self.session is not None
        self.session.store.close()
        with Store(self.path) as store:
            assert_saved(store, self.ids, "chat")
            if self.has_old:
                assert_saved(store, OLD, "old")
            assert_clean(store)
        self.check_leftovers()

    def check_refusal(self) -> None:
        error = self.raised
        assert isinstance(error, KvsnapError), f"raises {error!r} in {place_of(error)}"
        assert error.what, "says nothing"
        assert error.hint, f"says not what to do: {error.what}"
        self.check_leftovers()
        with Store(self.path) as store:
            # A row whose file is gone is told of, too: that one was removed, and is no wrong file.
            wrong = [bad for bad in verify_store(store).bad if Path(bad.path).exists()]
            assert wrong == []
            if self.has_old:
                assert_saved(store, OLD, "old")

    def check_leftovers(self) -> None:
        """Nothing half done stays, unless it was the taking away that failed."""
        left = [file.name for file in self.path.glob("tmp/*.part")]
        assert left == [] or any(call.startswith("unlink") for call in self.calls.failed), left

    def retry(self) -> None:
        if self.session is None:
            self.session = Session(Store(self.path), self.engine, "chat")
        self.session.save()


def place_of(error: Exception) -> list[str]:
    """The last functions that an error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{Path(frame.filename).name}:{frame.name}" for frame in frames][-6:-1]


def attempts(folder: Path, before: Path | None, fault: Callable[[int], Fault]) -> Iterator[Attempt]:
    """One for each call of a save, until a save needs no call of that number."""
    for number in itertools.count():
        attempt = Attempt(folder / str(number), before, fault(number))
        if not attempt.calls.failed:
            assert number > 50
            return
        yield attempt
        shutil.rmtree(folder / str(number))


def problems(found: Iterator[Attempt]) -> list[str]:
    """What is not as it should be, each with the call that had failed."""
    told = []
    for attempt in found:
        try:
            attempt.check()
        except (AssertionError, KvsnapError, OSError) as error:
            told.append(f"{attempt.calls.failed[0]}: {error!s:.300}")
    return told


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
def test_a_save_in_which_any_one_call_fails_is_done_or_refused(
    tmp_path: Path, before: Path, start: str, error: int
) -> None:
    store = before if start != "a new store" else None
    assert problems(attempts(tmp_path, store, lambda number: Fault(number, error))) == []


@pytest.mark.parametrize("start", STARTS)
def test_a_save_in_which_all_calls_fail_from_any_one_on_is_done_or_refused(
    tmp_path: Path, before: Path, start: str
) -> None:
    def fault(number: int) -> Fault:
        return Fault(number, ERRORS[number % len(ERRORS)], lasting=True)

    store = before if start != "a new store" else None
    assert problems(attempts(tmp_path, store, fault)) == []


def test_taking_away_what_is_left_over_may_fail_for_ever(tmp_path: Path, before: Path) -> None:
    # A42: cleaning up that fails is no failure of the save.
    for start, store in zip(STARTS, [None, before], strict=True):
        fault = Fault(0, errno.EBUSY, lasting=True, only=("unlink", "remove", "rmdir"))
        attempt = Attempt(tmp_path / start, store, fault)
        assert attempt.raised is None
        attempt.check()


def test_what_was_just_saved_is_used_from_memory(tmp_path: Path, before: Path) -> None:
    # A42: a file that was just published need not be readable back at once.
    path = tmp_path / "store"
    shutil.copytree(before, path)
    with Store(path) as store, watching(path / "sessions", UNREADABLE) as calls:
        engine = StampedEngine()
        engine.evaluate(NEW)
        session = Session(store, engine, "chat")
        session.save()
        engine.truncate(0)
        done = session.resume(NEW, leave=0)
        engine.check_rows()
    assert (done.reused_tokens, calls.failed) == (len(NEW), [])


class Reading:
    """One resume of `chat` from a copy of `saved`, with a fault in calls on its blocks."""

    def __init__(self, folder: Path, saved: Path, fault: Fault) -> None:
        self.path = folder / "store"
        shutil.copytree(saved, self.path)
        self.engine = StampedEngine()
        with Store(self.path) as store:
            session = Session(store, self.engine, "chat")
            with watching(self.path / "blocks", fault) as self.calls:
                self.report = session.resume(NEW, leave=0)

    def check(self) -> None:
        self.engine.check_rows()
        assert self.engine.held == self.report.reused_tokens
        assert self.report.damage or self.report.reused_tokens == len(NEW)
        assert not list(self.path.glob("quarantine/*")), "an error of the device tells nothing"
        with Store(self.path) as store:
            assert_saved(store, NEW, "chat")
            assert_clean(store)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, before: Path) -> Path:
    """A store in which `NEW` was saved: three blocks and a tail."""
    path = tmp_path_factory.mktemp("saved") / "store"
    shutil.copytree(before, path)
    engine = StampedEngine()
    engine.evaluate(NEW)
    with Store(path) as store:
        Session(store, engine, "chat").save()
    return path


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("error", ERRORS, ids=NAMES)
def test_a_resume_in_which_any_one_call_on_a_block_fails_is_shorter_and_says_why(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, error: int, lasting: bool
) -> None:
    monkeypatch.setattr(restore, "MAX_THREADS", 1)
    reused = set()
    for number in itertools.count():
        # Only reading fails: a file that was wrongly set aside must be seen to have moved.
        fault = Fault(number, error, lasting, only=READING)
        reading = Reading(tmp_path / str(number), saved, fault)
        if not reading.calls.failed:
            assert number >= 12
            break
        reading.check()
        reused.add(reading.report.reused_tokens)
    opened_again = error == errno.ESTALE and not lasting
    assert min(reused) == (len(NEW) if opened_again else 0)


@pytest.mark.parametrize("function", ["open", "fstat", "readv"])
def test_a_block_that_is_stale_once_is_opened_again(
    tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    # A42: on a network file system a file just renamed into place may be stale to its readers.
    monkeypatch.setattr(restore, "MAX_THREADS", 1)
    for number in range(3):
        fault = Fault(number, errno.ESTALE, only=(function,))
        reading = Reading(tmp_path / str(number), saved, fault)
        assert reading.calls.failed
        assert reading.report.reused_tokens == len(NEW)
        reading.check()
