"""Sealed and signed at once: the signature is inside, and asked for as of plain files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import Untrusted
from kvsnap.formats.sealed import is_sealed
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
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.signers import Signers
from tests.tenants import ALICE

IDS = secret_ids(4 * BLOCK + 7, 1)
MORE = [*IDS, *secret_ids(BLOCK, 2)]
ME = ALICE.tenant_id


@pytest.fixture
def keys(tmp_path: Path) -> Signers:
    return Signers(tmp_path / "keys")


@pytest.fixture
def machine(tmp_path: Path, keys: Signers) -> Callable[..., Store]:
    """The store of a machine, which trusts the others that are named."""

    def open_it(name: str, *trusted: str, encrypt: bool = True) -> Store:
        found = open_encrypted(
            tmp_path / name, encrypt=encrypt, trust=[keys.public(other) for other in trusted]
        )
        found.keys.add(ALICE)
        return found

    return open_it


def told() -> Told:
    found = Told(ids=[IDS])
    found.texts += [WEIGHTS, ARCHITECTURE]
    return found


def assert_sealed(remote: MemoryRemote) -> None:
    assert leaks(told(), [(key, one.data) for key, one in remote.objects.items()]) == []
    assert all(is_sealed(memoryview(one.data)) for one in remote.objects.values())


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_a_store_that_trusts_takes_what_is_sealed_and_signed(
    machine: Callable[..., Store], keys: Signers, encrypt: bool
) -> None:
    remote = MemoryRemote()
    with keys.machine("a"), machine("a", "z", encrypt=encrypt) as a:
        save(a, IDS, NAME, ALICE)
        assert push(a, remote, ME, NAME, encrypt=True).moved_files == 5
        again = push(a, remote, ME, NAME, encrypt=True).moved_files
        assert again <= 1, "blocks that are signed there stay; a session's file may go again"
    assert_sealed(remote)
    with keys.machine("b"), machine("b", "a") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
        assert verify_remote(remote, tenant=ALICE, trust=b.trust).bad == []
        save(b, MORE, NAME, ALICE)
        push(b, remote, ME, NAME)
    with keys.machine("c"), machine("c", "a") as c, pytest.raises(Untrusted):
        pull(c, remote, NAME, tenant=ALICE)
    with keys.machine("d"), machine("d", "a", "b") as d:
        pull(d, remote, NAME, tenant=ALICE)
        assert restored(d, MORE, NAME, tenant=ALICE) == len(MORE)


def test_what_is_sealed_alone_is_refused_where_signatures_are_asked_for(
    machine: Callable[..., Store], keys: Signers
) -> None:
    remote = MemoryRemote()
    with keys.machine("a"), machine("a") as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME)
    with keys.machine("b"), machine("b", "a") as b:
        with pytest.raises(Untrusted, match="nobody signed it"):
            pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == 0
        assert verify_remote(remote, tenant=ALICE, trust=b.trust).bad


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
def test_signed_by_the_push_it_is_taken(
    machine: Callable[..., Store], keys: Signers, encrypt: bool
) -> None:
    remote = MemoryRemote()
    with keys.machine("a"), machine("a", encrypt=encrypt) as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME, encrypt=True)
        push(a, remote, ME, NAME, encrypt=True, sign=True)
        assert restored(a, IDS, NAME, tenant=ALICE) == len(IDS)
    sweep(remote, grace_days=0)  # the session's file of before
    assert_sealed(remote)
    with keys.machine("b"), machine("b", "a") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)


def test_signed_files_in_the_clear_are_sealed_by_a_later_push(
    machine: Callable[..., Store], keys: Signers
) -> None:
    """That they are signed does not make them sealed."""
    remote = MemoryRemote()
    with keys.machine("a"), machine("a", "z", encrypt=False) as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME)
        assert leaks(told(), [(key, one.data) for key, one in remote.objects.items()])
        push(a, remote, ME, NAME, encrypt=True)
    assert_sealed(remote)
    with keys.machine("b"), machine("b", "a") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
