"""One system call of a branch, or of a save in the background, fails: it is told, nothing is half."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.kvstore import files
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved, stored_ids
from kvsnap.testing.calls import Calls, Fault, watching
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn

pytestmark = pytest.mark.slow

IDS, CUT = some_ids(75), 40
NEW = some_ids(20, seed=4)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls come in the same order every time."""
    monkeypatch.setattr(files, "SYNC_THREADS", 1)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which `IDS` were saved."""
    path = tmp_path_factory.mktemp("before") / "store"
    path.mkdir(mode=0o700)
    text = json.dumps({"block_size": 16, "created": 1, "format": "1"})
    (path / "kvsnap.json").write_text(text)
    with Store(path) as store:
        turn(store, StampedEngine(), IDS, "chat")
    return path


def attempt(folder: Path, before: Path, fault: Fault, call: str) -> tuple[Calls, bool]:
    """The calls that were made, and whether anything was raised; the store is whole either way."""
    path, raised = folder / "store", None
    folder.mkdir()
    shutil.copytree(before, path)
    engine = StampedEngine()
    with Store(path) as store:
        session = Session(store, engine, "chat")
        session.resume(IDS, leave=0)
        engine.evaluate(NEW)
        with watching(folder, fault) as calls:
            try:
                if call == "branch":
                    session.branch("fork", CUT)
                else:
                    session.save_soon()
                    session.flush()
            except KvsnapError as error:
                raised = error
        if raised is not None:
            assert raised.hint, raised.what
            assert session.flush() is None, "it is raised once"
            if call == "branch":
                assert stored_ids(store, "fork") in (None, IDS[:CUT].tolist())
                with_same_name = stored_ids(store, "fork") is not None
                if with_same_name:  # published, and not durable for sure: that is what was told
                    with pytest.raises(UsageError, match="is there already"):
                        session.branch("fork", CUT)
                else:
                    session.branch("fork", CUT)
            else:
                assert stored_ids(store, "chat") in (IDS.tolist(), [*IDS, *NEW])
                session.save_soon()
        session.close()
    with Store(path) as store:
        if call == "branch":
            assert_saved(store, IDS[:CUT], "fork")
            assert_saved(store, IDS, "chat")
        else:
            assert_saved(store, [*IDS, *NEW], "chat")
        assert_clean(store)
    left = list(path.glob("tmp/*.part"))
    assert left == [] or any(made.startswith("unlink") for made in calls.failed)
    return calls, raised is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize("call", ["branch", "save_soon"])
def test_whichever_call_fails(tmp_path: Path, before: Path, call: str, code: int) -> None:
    raised = 0
    for number in itertools.count():
        folder = tmp_path / str(number)
        calls, told = attempt(folder, before, Fault(number, code), call)
        raised += told
        shutil.rmtree(folder)
        if not calls.failed:
            break
    assert number > 20
    assert raised > 5
