"""This machine's signing key: one file of the user's, made once, readable by nobody else."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.formats.signature import new_signing_key, parse_signing_key
from kvsnap.kvstore.signing_key import (
    find_signing_key,
    require_signing_key,
    signing_key_path,
    write_key_file,
)
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import chain_files, other_rows
from tests.signers import STRANGER

IDS = some_ids(57)
SOMEBODY = "ab" * 32
NOBODY = 65534


def test_a_key_is_made_once_when_it_is_needed_for_its_owner_alone(own_signing_key: Path) -> None:
    assert find_signing_key() is None
    assert not own_signing_key.parent.exists()
    before = os.umask(0)
    try:
        key = require_signing_key()
    finally:
        os.umask(before)
    assert stat.S_IMODE(own_signing_key.stat().st_mode) == 0o600
    assert stat.S_IMODE(own_signing_key.parent.stat().st_mode) == 0o700
    assert [path.name for path in own_signing_key.parent.iterdir()] == ["signing.pem"]
    data = own_signing_key.read_bytes()
    again = require_signing_key()
    assert again.public == key.public
    assert own_signing_key.read_bytes() == data
    assert parse_signing_key(data).public == key.public


def test_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSNAP_SIGNING_KEY_FILE", "~/mine.pem")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert signing_key_path() == tmp_path / "mine.pem"
    for nothing in (None, ""):
        if nothing is None:
            monkeypatch.delenv("KVSNAP_SIGNING_KEY_FILE")
        else:
            monkeypatch.setenv("KVSNAP_SIGNING_KEY_FILE", nothing)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
        assert signing_key_path() == tmp_path / "configuration" / "kvsnap" / "signing.pem"


def test_a_key_file_is_never_written_over(own_signing_key: Path) -> None:
    require_signing_key()
    before = own_signing_key.read_bytes()
    with pytest.raises(FileExistsError):
        write_key_file(own_signing_key, new_signing_key().pem())
    assert own_signing_key.read_bytes() == before
    assert [path.name for path in own_signing_key.parent.iterdir()] == ["signing.pem"]


def test_what_an_interrupted_writer_left_is_in_nobodys_way(own_signing_key: Path) -> None:
    own_signing_key.parent.mkdir(parents=True)
    left = own_signing_key.with_name(f".signing.pem.{os.getpid()}.part")
    left.write_text("half a key")
    key = require_signing_key()
    assert parse_signing_key(own_signing_key.read_bytes()).public == key.public


def test_all_who_need_it_at_once_get_the_key_that_is_in_the_file(own_signing_key: Path) -> None:
    """Else one of them signs with a key that nobody has afterwards."""
    for _ in range(10):
        start, found, errors = threading.Barrier(8), list[str](), list[Exception]()

        def work(
            start: threading.Barrier = start,
            found: list[str] = found,
            errors: list[Exception] = errors,
        ) -> None:
            start.wait()
            try:
                found.append(require_signing_key().public)
            except Exception as error:  # noqa: BLE001 - shown by the test itself
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert set(found) == {parse_signing_key(own_signing_key.read_bytes()).public}
        own_signing_key.unlink()


CHILD = """
import sys, time
from kvsnap.kvstore.signing_key import require_signing_key
sys.stdin.readline()
print(require_signing_key().public, flush=True)
"""


def test_processes_that_need_it_at_once_get_one_key(own_signing_key: Path) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    found = {child.communicate(timeout=60)[0] for child in children}
    assert found == {parse_signing_key(own_signing_key.read_bytes()).public + "\n"}


def test_a_key_that_another_process_makes_is_believed_by_who_had_the_store_open(
    store_path: Path, own_signing_key: Path
) -> None:
    """There was none when it looked: for a block of somebody who is not listed."""
    with Store(store_path, trust=[STRANGER.public]) as store:
        turn(store, StampedEngine(), IDS[:32], "theirs")
    for path in chain_files(store_path):
        path.write_bytes(other_rows(path.read_bytes(), STRANGER))
    own_signing_key.unlink()
    with Store(store_path, trust=[SOMEBODY]) as before:
        engine = StampedEngine()
        turn(before, engine, IDS, save=False)
        engine.check_rows()
        assert engine.evaluated == 57
        with Store(store_path, trust=[SOMEBODY]) as other:
            assert not own_signing_key.exists()
            turn(other, StampedEngine(), some_ids(57, 5), "chat")
        assert own_signing_key.exists()
        engine = StampedEngine()
        done = turn(before, engine, some_ids(57, 5), "chat", save=False)
        assert engine.positions == [56], done.resumed.damage


def malformed(path: Path) -> None:
    path.write_text("secret words")


def another_kind(path: Path) -> None:
    path.write_text("ab" * 32 + "\n")  # a tenant's


def empty(path: Path) -> None:
    path.touch()


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("spoil", [malformed, another_kind, empty, folder, device])
def test_a_key_file_that_holds_none_is_an_error_of_one_line_that_names_it(
    own_signing_key: Path, spoil: Callable[[Path], None]
) -> None:
    own_signing_key.parent.mkdir(parents=True)
    spoil(own_signing_key)
    for work in (find_signing_key, require_signing_key):
        with pytest.raises(UsageError) as caught:
            work()
        assert str(own_signing_key) in caught.value.what
        assert caught.value.hint
        assert "\n" not in caught.value.what + caught.value.hint
        assert "secret" not in caught.value.what + caught.value.hint


@pytest.mark.parametrize("spoil", [malformed, folder])
def test_it_is_no_reason_to_set_this_machines_own_blocks_aside(
    store_path: Path, own_signing_key: Path, spoil: Callable[[Path], None]
) -> None:
    """What cannot be told apart for want of a key is an error when the store is opened, and not
    damage of one block after the other."""
    with Store(store_path, trust=[SOMEBODY]) as store:
        turn(store, StampedEngine(), IDS, "chat")
    key = own_signing_key.read_bytes()
    own_signing_key.unlink()
    spoil(own_signing_key)
    with (
        pytest.raises(UsageError, match="signing"),
        Store(store_path, trust=[SOMEBODY]) as store,
    ):
        turn(store, StampedEngine(), IDS, "chat")
    assert not list((store_path / "quarantine").glob("*"))
    own_signing_key.rmdir() if own_signing_key.is_dir() else own_signing_key.unlink()
    own_signing_key.write_bytes(key)
    with Store(store_path, trust=[SOMEBODY]) as store:
        engine = StampedEngine()
        turn(store, engine, IDS, "chat")
        assert engine.positions == [56]
        assert verify_store(store).bad == []


def test_a_key_file_may_be_a_link(own_signing_key: Path, tmp_path: Path) -> None:
    """Secrets that are mounted into a container are links, and so are the files of some people's
    configuration."""
    real = tmp_path / "real.pem"
    key = new_signing_key()
    write_key_file(real, key.pem())
    own_signing_key.parent.mkdir(parents=True)
    own_signing_key.symlink_to(real)
    found = find_signing_key()
    assert found is not None
    assert found.public == key.public
    assert require_signing_key().public == key.public


@pytest.mark.parametrize("place", ["/proc/no/such/signing.pem", "FILE/signing.pem"])
def test_a_place_where_none_can_be_written_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store_path: Path, place: str
) -> None:
    """As a home that is read-only."""
    (tmp_path / "FILE").write_text("mine")
    path = tmp_path / place if place.startswith("FILE") else Path(place)
    monkeypatch.setenv("KVSNAP_SIGNING_KEY_FILE", str(path))
    assert find_signing_key() is None
    with pytest.raises(UsageError, match="signing key") as caught:
        require_signing_key()
    assert str(path) in caught.value.what
    assert "KVSNAP_SIGNING_KEY_FILE" in caught.value.hint
    with Store(store_path, trust=[SOMEBODY]) as store:
        engine = StampedEngine()
        with pytest.raises(KvsnapError, match="signing key"):
            turn(store, engine, IDS, "chat")
        assert engine.evaluated == 57
        assert not list(store.listing)


AS_NOBODY = f"""
import os, sys
from kvsnap.kvstore import signing_key
from kvsnap.formats import signature
signature.new_signing_key()
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    getattr(signing_key, sys.argv[1])()
except signing_key.UsageError as error:
    print(error.what, error.hint, sep="\\n")
"""


@pytest.mark.parametrize("work", ["find_signing_key", "require_signing_key"])
@pytest.mark.parametrize("case", ["closed file", "closed folder", "read-only folder"])
def test_modes_that_are_in_the_way(
    monkeypatch: pytest.MonkeyPatch, work: str, case: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        path = home / "signing.pem"
        if case != "read-only folder":
            write_key_file(path, new_signing_key().pem())
        if case == "closed folder":
            home.chmod(0o700)
        monkeypatch.setenv("KVSNAP_SIGNING_KEY_FILE", str(path))
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, work],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/",
        )
    if (case, work) == ("read-only folder", "find_signing_key"):
        assert done.stdout == "", "there is none"
        return
    what, hint = done.stdout.splitlines()
    assert str(path) in what
    assert "Permission denied" in what
    assert "KVSNAP_SIGNING_KEY_FILE" in hint


def test_the_private_key_is_in_no_store_and_no_report(
    store_path: Path, own_signing_key: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(store_path, trust=[SOMEBODY]) as store:
        done = turn(store, StampedEngine(), IDS, "chat", codec="raw")
        assert store.trust is not None
        shown = [repr(store.trust.key), repr(vars(store.trust)), repr(done.saved), caplog.text]
    text = "".join(own_signing_key.read_text().splitlines()[1:-1])
    from base64 import b64decode

    secret = b64decode(text)[-32:]
    needles = [secret, secret.hex().encode(), text.encode(), text[-40:].encode()]
    files = [path for path in store_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    for data in [*(path.read_bytes() for path in files), *(line.encode() for line in shown)]:
        assert not any(needle in data for needle in needles)
