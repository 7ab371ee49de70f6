"""Tenants in one store: in an encrypted one each has the same prompt for itself; in the clear two with
keys are refused before anything is computed or written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.formats.errors import KvsnapError, UsageError
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.memory_remote import MemoryRemote
from kvsnap.testing.recount import assert_closed, assert_counts
from tests.sealed_places import (
    BLOCK,
    NAME,
    engine,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE, BOB

IDS = secret_ids(4 * BLOCK + 7, 1)


def everything(path: Path) -> dict[str, bytes]:
    """All that a store's files hold, but the log and what says that a process is at it."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*.safetensors")
        if file.is_file()
    }


def test_two_have_the_same_prompt_and_nothing_in_common(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store:
        for tenant in (ALICE, BOB):
            assert restored(store, IDS, NAME, tenant=tenant) == 0, "the other's is no hit"
            save(store, IDS, NAME, tenant)
        files = everything(store.path)
        assert len(files) == 2 * 5
        assert len({data[200:] for data in files.values()}) == len(files)
        for tenant in (ALICE, BOB):
            assert restored(store, IDS, NAME, tenant=tenant) == len(IDS)
            assert verify_store(store, tenant).checked == 5
        assert_closed(store)
        assert_counts(store)
    with open_encrypted(tmp_path / "s") as store:
        store.keys.add(BOB)
        store.sessions.remove(BOB.tenant_id, NAME)
        with open_encrypted(tmp_path / "s", capacity=1) as small:
            gc(small)
        assert restored(store, IDS, NAME, tenant=BOB) == 0
        assert restored(store, IDS, NAME, tenant=ALICE) == 0
        save(store, IDS, NAME, BOB)
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)


def refuses(tmp_path: Path, does: Callable[[Store], object]) -> UsageError:
    """What somebody with another key is told; nothing was written."""
    before = everything(tmp_path)
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        rows = store.index.query("SELECT name, bytes FROM blocks ORDER BY id")
        with pytest.raises(UsageError) as told:
            does(store)
        assert store.index.query("SELECT name, bytes FROM blocks ORDER BY id") == rows
    assert everything(tmp_path) == before
    assert "\n" not in told.value.what
    assert "--encrypt" in told.value.hint
    return told.value


def bob(store: Store) -> Session:
    return Session(store, engine(), NAME, tenant=BOB)


def saves(store: Store) -> None:
    session = bob(store)
    session.engine.evaluate(IDS)
    session.save()


def saves_soon(store: Store) -> None:
    with bob(store) as session:
        session.engine.evaluate(IDS)
        session.save_soon()


def puts_what_is_filled(store: Store) -> None:
    session = Session(store, engine(), tenant=BOB)
    session.engine.evaluate(IDS)
    session.put_filled()


def pulls(store: Store) -> None:
    with open_encrypted(store.path.parent.parent / "bobs", encrypt=True) as other:
        save(other, IDS, NAME, BOB)
        remote = MemoryRemote()
        push(other, remote, BOB.tenant_id, NAME)
    pull(store, remote, NAME, tenant=BOB)


@pytest.mark.parametrize("name", [NAME, None], ids=["a session", "blocks alone"])
@pytest.mark.parametrize("does", [saves, saves_soon, puts_what_is_filled, pulls])
def test_a_second_key_is_refused_in_a_plain_store(
    tmp_path: Path, name: str | None, does: Callable[[Store], object]
) -> None:
    (tmp_path / "t").mkdir()
    with open_encrypted(tmp_path / "t" / "s", encrypt=False) as store:
        save(store, IDS, name, ALICE)
    told = refuses(tmp_path / "t", does)
    assert "another tenant" in told.what
    with open_encrypted(tmp_path / "t" / "s", encrypt=False) as store:
        assert restored(store, IDS, name, tenant=ALICE) >= 4 * BLOCK
        save(store, IDS, name, ALICE)
    with open_encrypted(tmp_path / "t" / "s") as store:
        does(store)
        assert restored(store, IDS, tenant=BOB) == 4 * BLOCK


def test_read_through_does_not_bring_a_second_tenants_blocks(tmp_path: Path) -> None:
    remote = MemoryRemote()
    with open_encrypted(tmp_path / "bobs") as store:
        save(store, IDS, NAME, BOB)
        push(store, remote, BOB.tenant_id, NAME)
    with open_encrypted(tmp_path / "alices", encrypt=False) as store:
        save(store, IDS, NAME, ALICE)
    before = everything(tmp_path / "alices")
    with open_encrypted(tmp_path / "alices", encrypt=False, remote=remote) as store:
        assert restored(store, IDS, NAME, tenant=BOB) == 0
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
    assert everything(tmp_path / "alices") == before
    with open_encrypted(tmp_path / "own", remote=remote) as store:
        assert restored(store, IDS, tenant=BOB) == 4 * BLOCK
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)


@pytest.mark.parametrize("first", [None, ALICE], ids=["without a key", "with one"])
def test_one_key_and_those_without_may_share_a_plain_store(
    tmp_path: Path, first: Tenant | None
) -> None:
    second = ALICE if first is None else None
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        for tenant in (first, second, first):
            save(store, IDS, NAME, tenant)
            save(store, IDS[:30], None, tenant)
        for tenant in (first, second):
            assert restored(store, IDS, NAME, tenant=tenant) == len(IDS)
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        save(store, IDS, NAME, second)


def test_another_model_of_the_same_tenant_is_no_other_tenant(tmp_path: Path) -> None:
    """Nor is a lossy chain, or an index that is built anew."""
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        save(store, IDS, None, ALICE)
        save(store, IDS, None, ALICE, codec="q8")
        other = Session(store, engine(rotation_k=1), tenant=ALICE)
        other.engine.evaluate(IDS)
        other.save()
    for file in tmp_path.glob("s/index*"):
        file.unlink()
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        save(store, IDS, NAME, ALICE)
    with open_encrypted(tmp_path / "s", encrypt=False) as store, pytest.raises(UsageError):
        save(store, IDS, NAME, BOB)


def test_blocks_that_were_evicted_are_in_nobodys_way(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        save(store, IDS, None, ALICE)
    with open_encrypted(tmp_path / "s", encrypt=False, capacity=1) as small:
        gc(small)
    with open_encrypted(tmp_path / "s", encrypt=False) as store:
        save(store, IDS, NAME, BOB)
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)


@pytest.mark.parametrize(
    "does",
    [
        lambda session: session.save(),
        lambda session: session.save_soon(),
        lambda session: session.put_filled(),
    ],
    ids=["save", "save soon", "put filled"],
)
def test_an_encrypted_store_takes_nothing_without_a_key(
    tmp_path: Path, does: Callable[[Session], object]
) -> None:
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
    before = everything(tmp_path / "s")
    with open_encrypted(tmp_path / "s") as store:
        session = Session(store, engine(), NAME)
        session.resume(IDS)
        session.engine.evaluate(IDS)
        with pytest.raises(UsageError, match="no tenant key was given") as told:
            does(session)
        assert "keygen" in told.value.hint
        with pytest.raises(UsageError):
            store.check_tenant("default")
    assert everything(tmp_path / "s") == before


def test_a_key_that_was_given_as_its_id_alone_seals_nothing(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store, pytest.raises(UsageError, match="was not given"):
        store.check_tenant(ALICE.tenant_id)
    with open_encrypted(tmp_path / "s") as store:
        save(store, IDS, NAME, ALICE)
    with open_encrypted(tmp_path / "s") as store, pytest.raises(KvsnapError):
        push(store, MemoryRemote(), ALICE.tenant_id, NAME)
