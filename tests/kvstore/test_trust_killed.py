"""kill -9 while a list is changed, and two who change it at once: no key is lost, no block stays half
signed, nothing that was signed is set aside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvsnap.formats.codecs import get_codec
from kvsnap.formats.errors import Untrusted
from kvsnap.kvstore import files, place, signing
from kvsnap.kvstore.recompress import recompress
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.killed import Killed, die, killed_between_rename_and_row
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import block_of, chain_files

IDS = some_ids(16 * 12 + 5)
A, B = "ab" * 32, "cd" * 32
CHILD = """
import os, signal, sys
from pathlib import Path
from kvsnap.kvstore import space
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add

path, key, left = sys.argv[1], sys.argv[2], int(sys.argv[3])
publish = space.Room.publish

def counted(room, db, target):
    global left
    left -= 1
    if left == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    publish(room, db, target)
    if left == -2 + int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

space.Room.publish = counted
with Store(path) as store:
    add(store, key, "killed", vouch=True)
"""


@pytest.fixture
def saved(store_path: Path) -> Iterator[Path]:
    with Store(store_path) as store:
        turn(store, StampedEngine(), IDS, "chat")
    return store_path


def keys_of(path: Path) -> set[str]:
    return set(json.loads((path / "kvsnap.json").read_text()).get("trust", {}))


@pytest.mark.parametrize("signed", [0, 5, 11])
def test_a_killed_vouch_is_taken_up_by_the_next(saved: Path, signed: int) -> None:
    command = [sys.executable, "-c", CHILD, str(saved), A, str(signed), "0"]
    done = subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert keys_of(saved) == set(), "the list begins when all is signed"
    own = require_signing_key().public
    blocks = [block_of(path.read_bytes()) for path in chain_files(saved)]
    assert sum(block.signer == own for block in blocks) == signed
    with Store(saved) as store:
        assert_saved(store, IDS, "chat")
        assert_clean(store)
        done_now = add(store, A, vouch=True)
    assert (done_now.vouched, done_now.set_aside, done_now.sessions) == (12 - signed, 0, 1)
    with Store(saved) as store:
        assert_saved(store, IDS, "chat")
        assert_clean(store)
    assert keys_of(saved) == {A}


def test_a_block_that_was_renamed_and_whose_row_was_not_written_is_not_lost(saved: Path) -> None:
    store = Store(saved)
    with killed_between_rename_and_row() as renamed:
        add(store, A, vouch=True)
    die(store)
    assert len(renamed) == 1
    assert block_of(renamed[0].read_bytes()).signed
    with Store(saved) as store:
        done = add(store, A, vouch=True)
    assert (done.vouched, done.set_aside) in ((11, 0), (12, 0))
    with Store(saved) as store:
        assert_clean(store)
        assert_saved(store, IDS, "chat")


def test_the_same_without_vouching_for_the_rest(saved: Path) -> None:
    """The file is believed and not its row: what is signed is not set aside as unsigned."""
    store = Store(saved)
    with killed_between_rename_and_row() as renamed:
        add(store, A, vouch=True)
    die(store)
    with Store(saved) as store:
        done = add(store, A)
    assert done.set_aside == 11
    assert chain_files(saved) == renamed
    engine = StampedEngine()
    with Store(saved) as store:
        turn(store, engine, IDS, "chat")
    assert engine.positions == list(range(16, len(IDS)))
    engine.check_rows()


def test_killed_while_the_unsigned_are_set_aside(saved: Path) -> None:
    """The list is there by then; what is still in its place is found out by whoever reads it."""
    aside, left = place.Place.set_aside, [5]

    def some(where: place.Place, path: Path, reason: str) -> Path | None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return aside(where, path, reason)

    store = Store(saved)
    with mock.patch.object(place.Place, "set_aside", some), pytest.raises(Killed):
        add(store, A)
    die(store)
    assert keys_of(saved) == {A}
    assert len(chain_files(saved)) == 7
    engine = StampedEngine()
    with Store(saved) as store:
        turn(store, engine, IDS, "chat")
        engine.check_rows()
        assert engine.positions == list(range(len(IDS)))
        assert_clean(store)
    with Store(saved) as store:
        assert add(store, B).set_aside == 0
        assert_saved(store, IDS, "chat")


def test_two_processes_add_a_key_each_and_both_stay(saved: Path) -> None:
    program = (
        "import sys\n"
        "from kvsnap.kvstore.store import Store\n"
        "from kvsnap.kvstore.trust_list import add\n"
        "with Store(sys.argv[1]) as store:\n"
        "    sys.stdin.readline()\n"
        "    for number in range(8):\n"
        "        add(store, sys.argv[2] * 30 + f'{number:04x}', vouch=True)\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program, str(saved), pair],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pair in ("aa", "bb")
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        _, error = child.communicate(timeout=60)
        assert child.returncode == 0, error
    assert keys_of(saved) == {p * 30 + f"{n:04x}" for p in ("aa", "bb") for n in range(8)}
    with Store(saved) as store:
        assert_saved(store, IDS, "chat")
        assert_clean(store)


def test_a_session_that_is_saved_while_it_is_vouched_for_is_signed_as_it_is_then(
    saved: Path,
) -> None:
    pack, did = signing.pack_session, list[int]()

    def meanwhile(*words: object) -> object:
        if not did:
            did.append(1)
            with Store(saved) as other:
                turn(other, StampedEngine(), IDS, "chat")
        return pack(*words)  # type: ignore[arg-type]

    with Store(saved) as store, mock.patch.object(signing, "pack_session", meanwhile):
        assert add(store, A, vouch=True).sessions == 1
    assert keys_of(saved) == {A}
    with Store(saved) as store:
        found = store.sessions.load("default", "chat")
        assert (found.signed, found.record.revision) == (True, 3)
        assert_saved(store, IDS, "chat")


def test_the_first_save_into_a_new_store_does_not_wipe_a_list_that_is_made_meanwhile(
    tmp_path: Path,
) -> None:
    """Both find that there is no kvsnap.json yet."""
    path, sync = tmp_path / "new", files.sync_upwards

    def meanwhile(folder: Path) -> None:
        with mock.patch.object(files, "sync_upwards", sync), Store(path) as other:
            add(other, A)
        sync(folder)

    with Store(path) as store, mock.patch.object(files, "sync_upwards", meanwhile):
        turn(store, StampedEngine(), IDS, "chat")
    assert keys_of(path) == {A}


def test_two_who_make_a_new_store_by_adding_a_key_keep_both(tmp_path: Path) -> None:
    path, sync = tmp_path / "new", files.sync_upwards

    def meanwhile(folder: Path) -> None:
        with mock.patch.object(files, "sync_upwards", sync), Store(path) as other:
            add(other, A)
        sync(folder)

    with Store(path) as store, mock.patch.object(files, "sync_upwards", meanwhile):
        add(store, B)
    assert keys_of(path) == {A, B}


def test_a_block_that_is_saved_anew_while_it_is_signed_is_not_set_back(saved: Path) -> None:
    """Its file was read, and another one stands there when the signed one is to be published."""
    read, target = files.read_whole, chain_files(saved)[3]
    saver = Store(saved)
    did = list[int]()

    def meanwhile(path: Path, *rest: object) -> memoryview:
        found = read(path, *rest)  # type: ignore[arg-type]
        if path == target and not did:
            did.append(1)
            with mock.patch.object(signing.files, "read_whole", read):
                recompress(saver, "chat", get_codec("raw"))
        return found

    with Store(saved) as store, mock.patch.object(signing.files, "read_whole", meanwhile):
        add(store, A, vouch=True)
    saver.close()
    assert did
    with Store(saved) as store:
        for path in chain_files(saved):
            block = block_of(path.read_bytes())
            row = store.index.find(block.record.name)
            assert row is not None
            assert (row.bytes, row.signer) == (path.stat().st_size, block.signer)
            assert store.trust is not None
            try:
                store.opener.block(memoryview(path.read_bytes()))
            except Untrusted:
                assert path == target, "the one that was saved anew meanwhile"
        engine = StampedEngine()
        turn(store, engine, IDS, "chat")
        engine.check_rows()
        assert_saved(store, IDS, "chat")
