"""A session that was pushed in the clear is sealed by a later push: whenever that is cut off, whoever
has the key can pull it, and the next push leaves nothing of it in the clear."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import Diverged, RemoteDown
from kvsnap.formats.manifest import manifest_key
from kvsnap.formats.sealed import is_sealed
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.base import Buffer, Remote
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing import manifests
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.testing.memory_remote import MemoryRemote
from tests.sealed_places import (
    ARCHITECTURE,
    BLOCK,
    NAME,
    WEIGHTS,
    Told,
    everything,
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.sharing.hooked import Hooked
from tests.tenants import ALICE

IDS = secret_ids(20 * BLOCK + 9, 1)
"""More blocks than move at once."""
MORE = np.concatenate([IDS, secret_ids(2 * BLOCK, 2)])
SHORT = IDS[: 2 * BLOCK + 5]
ME = ALICE.tenant_id
WRITES = ("put", "replace", "delete")


@pytest.fixture
def told() -> Told:
    found = Told(ids=[MORE])
    found.texts += [WEIGHTS, ARCHITECTURE]
    found.add_rows(SHORT)
    return found


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Store]:
    """A machine's plain store, with the session in it."""
    with open_encrypted(tmp_path / "a", encrypt=False) as store:
        save(store, IDS, NAME, ALICE)
        yield store


@pytest.fixture
def remote(plain: Store) -> MemoryRemote:
    """Where it was pushed to in the clear."""
    found = MemoryRemote()
    push(plain, found, ME, NAME)
    return found


def parts(remote: MemoryRemote) -> list[tuple[str, bytes]]:
    return [
        *((f"the name of {key}", key.encode()) for key in remote.objects),
        *((key, found.data) for key, found in remote.objects.items()),
    ]


def assert_all_sealed(remote: MemoryRemote, told: Told) -> None:
    assert leaks(told, parts(remote)) == []
    assert all(is_sealed(memoryview(one.data)) for one in remote.objects.values())
    assert len([key for key in remote.objects if key.startswith("manifests/")]) == 1


def copied(remote: MemoryRemote) -> MemoryRemote:
    new = MemoryRemote()
    new.objects = dict(remote.objects)
    return new


def test_nothing_of_it_stays_in_the_clear(
    plain: Store, remote: MemoryRemote, told: Told, tmp_path: Path
) -> None:
    assert leaks(told, parts(remote))
    report = push(plain, remote, ME, NAME, encrypt=True)
    assert (report.moved_files, report.files) == (21, 21)
    assert_all_sealed(remote, told)
    assert push(plain, remote, ME, NAME, encrypt=True).moved_files == 0
    with open_encrypted(tmp_path / "b") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)


def test_nor_of_what_it_was_before(plain: Store, remote: MemoryRemote, told: Told) -> None:
    """A sweep takes what plain pushes left that no session names any more."""
    save(plain, SHORT, NAME, ALICE)
    push(plain, remote, ME, NAME, force=True)
    push(plain, remote, ME, NAME, encrypt=True)
    assert leaks(told, parts(remote)), "files of the first push"
    sweep(remote, grace_days=0)
    assert_all_sealed(remote, told)
    assert verify_remote(remote, tenant=ALICE).bad == []


def test_an_encrypted_store_seals_it_as_well(
    plain: Store, remote: MemoryRemote, told: Told, tmp_path: Path
) -> None:
    with open_encrypted(plain.path) as store:
        save(store, MORE, NAME, ALICE)
        push(store, remote, ME, NAME)
    assert_all_sealed(remote, told)
    with open_encrypted(tmp_path / "b") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, MORE, NAME, tenant=ALICE) == len(MORE)


def test_so_does_write_behind(
    plain: Store, remote: MemoryRemote, told: Told, tmp_path: Path
) -> None:
    with open_encrypted(plain.path, remote=remote, write_behind=True) as store:
        save(store, MORE, NAME, ALICE)
        store.flush()
    assert_all_sealed(remote, told)


def can_be_pulled(remote: Remote) -> None:
    report = verify_remote(remote, name=NAME, tenant=ALICE)
    assert report.bad == []
    assert report.checked >= 22


def test_there_is_no_moment_in_which_it_cannot_be_pulled(
    plain: Store, remote: MemoryRemote
) -> None:
    moments = 0

    class Watched(Hooked):
        def put(self, key: str, data: Buffer) -> None:
            super().put(key, data)
            self.hook("after", key)

        def replace(self, key: str, data: Buffer, version: str | None) -> bool:
            done = super().replace(key, data, version)
            self.hook("after", key)
            return done

        def delete(self, key: str) -> None:
            super().delete(key)
            self.hook("after", key)

    def look(operation: str, key: str) -> None:
        nonlocal moments
        if operation == "after":
            can_be_pulled(copied(remote))
            moments += 1

    push(plain, Watched(remote, look), ME, NAME, encrypt=True)
    assert moments >= 20 + 1 + 1 + 2, "blocks, the session, its manifest, and what went"


def writes_of(does: Callable[[Remote], Any], remote: MemoryRemote) -> int:
    """How many writes it takes."""
    made: list[str] = []
    hooked = Hooked(copied(remote), lambda operation, key: made.append(operation))
    does(hooked)
    return sum(operation in WRITES for operation in made)


@pytest.mark.parametrize("force", [False, True])
def test_cut_off_at_any_write_it_can_be_pulled_and_the_next_push_ends_it(
    plain: Store, remote: MemoryRemote, told: Told, tmp_path: Path, force: bool
) -> None:
    def seal_it(where: Remote) -> Any:
        return push(plain, where, ME, NAME, encrypt=True, force=force)

    total = writes_of(seal_it, remote)
    assert total >= 24
    for fails_at in [*range(0, total, 5), *range(total - 4, total)]:
        begun, there = [0], copied(remote)

        def fail(operation: str, key: str, begun: list[int] = begun, at: int = fails_at) -> None:
            if operation in WRITES:
                begun[0] += 1
                if begun[0] > at:
                    raise RemoteDown("the cable was pulled")

        with pytest.raises(RemoteDown):
            seal_it(Hooked(there, fail))
        can_be_pulled(there)
        with open_encrypted(tmp_path / f"b{fails_at}", encrypt=False) as b:
            pull(b, there, NAME, tenant=ALICE)
            assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
        push(plain, there, ME, NAME, encrypt=True)
        assert_all_sealed(there, told)
        can_be_pulled(there)


def test_two_manifests_of_one_session_become_one(
    plain: Store, remote: MemoryRemote, told: Told
) -> None:
    """As a cut-off push leaves them. Who lists the remote sees both; who pulls, the sealed one."""
    plain_key = manifest_key(ME, NAME)
    old = remote.objects[plain_key]
    push(plain, remote, ME, NAME, encrypt=True)
    remote.put(plain_key, old.data)
    keys = Keyring()
    keys.add(ALICE)
    found = manifests.require(remote, keys, ME, NAME)
    assert found.manifest is not None
    assert found.manifest.sealed
    push(plain, remote, ME, NAME)
    assert_all_sealed(remote, told)


def test_a_plain_one_that_went_on_meanwhile_is_not_lost(
    plain: Store, remote: MemoryRemote, tmp_path: Path
) -> None:
    """Pushed by somebody whose process had no key at hand, beside a sealed one."""
    push(plain, remote, ME, NAME, encrypt=True)
    with open_encrypted(tmp_path / "b", encrypt=False) as b:
        pull(b, remote, NAME, tenant=ALICE)
        save(b, MORE, NAME, ALICE)
    with open_encrypted(tmp_path / "b", encrypt=False) as b:
        push(b, remote, ME, NAME)  # by the id of the tenant alone
    assert len([key for key in remote.objects if key.startswith("manifests/")]) == 2
    with pytest.raises(Diverged, match="it goes on from this one"):
        push(plain, remote, ME, NAME, encrypt=True)


def test_a_damaged_plain_manifest_goes_too(plain: Store, remote: MemoryRemote, told: Told) -> None:
    key = manifest_key(ME, NAME)
    remote.put(key, remote.objects[key].data[:100])
    push(plain, remote, ME, NAME, encrypt=True, force=True)
    assert key not in remote.objects
    can_be_pulled(remote)


CHILD = """
import os, signal, sys
from pathlib import Path
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing.push import push
from tests.sealed_places import NAME, open_encrypted
from tests.tenants import ALICE

class Dies(Folder):
    left = int(sys.argv[3])
    def one_less(self):
        Dies.left -= 1
        if Dies.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def put(self, key, data):
        self.one_less()
        super().put(key, data)
    def replace(self, key, data, version):
        self.one_less()
        return super().replace(key, data, version)
    def delete(self, key):
        self.one_less()
        super().delete(key)

with open_encrypted(Path(sys.argv[1]), encrypt=False) as store:
    store.keys.add(ALICE)
    push(store, Dies(sys.argv[2], 5.0), ALICE.tenant_id, NAME, encrypt=True)
"""


@pytest.mark.parametrize("writes", [3, 22])
def test_killed_it_can_be_pulled_and_the_next_push_ends_it(
    plain: Store, told: Told, tmp_path: Path, writes: int
) -> None:
    there = Folder((tmp_path / "remote").as_uri(), 5.0)
    push(plain, there, ME, NAME)
    command = [sys.executable, "-c", CHILD, str(plain.path), there.url, str(writes)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, check=False, capture_output=True, timeout=60, env=environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    can_be_pulled(there)
    push(plain, there, ME, NAME, encrypt=True)
    can_be_pulled(there)
    for left in (tmp_path / "remote").rglob("*+*"):  # what it was writing when it died
        left.unlink()
    assert leaks(told, everything(tmp_path / "remote")) == []
