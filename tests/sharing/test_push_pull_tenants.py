"""Tenants in one remote: names and blocks of two keys never meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, UsageError
from kvsnap.formats.tenant import Tenant, tenant_id
from kvsnap.kvstore.keyring import Keyring
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.manifests import require
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.store import Store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.sharing.objects import block_files, files_of, only, put_manifest, rewrite

Machine = Callable[..., Store]
IDS = some_ids(57)
ALICE, BOB = Tenant(bytes(range(32))), Tenant(bytes(range(1, 33)))


def save_and_push_as(store: Store, remote: Counted, tenant: Tenant | None) -> None:
    turn(store, StampedEngine(), IDS, "chat", tenant=tenant)
    push(store, remote, tenant_id(tenant), "chat")


def test_the_key_that_a_session_was_saved_with_is_needed(machine: Machine, remote: Counted) -> None:
    save_and_push_as(machine("a"), remote, ALICE)
    b = machine("b")
    for wrong in (None, BOB):
        with pytest.raises(NotFound):
            pull(b, remote, "chat", tenant=wrong)
    pull(b, remote, "chat", tenant=ALICE)
    engine = StampedEngine()
    turn(b, engine, IDS, "chat", tenant=ALICE, save=False)
    assert engine.positions == [56]
    engine.check_rows()
    for other in (None, BOB):
        engine = StampedEngine()
        turn(b, engine, IDS, tenant=other, save=False)
        assert engine.positions == list(range(57))


def test_one_name_under_three_keys_are_three_sessions(
    machine: Machine, remote: Counted, there: Path
) -> None:
    for name, tenant in {"a": ALICE, "b": BOB, "c": None}.items():
        store = machine(name)
        turn(store, StampedEngine(), IDS, "chat", tenant=tenant)
        push(store, remote, tenant_id(tenant), "chat", encrypt=tenant is not None)
    assert len(list(there.glob("manifests/*/*.safetensors"))) == 3
    assert len(block_files(there)) == 9


def test_two_keyed_tenants_share_no_place_in_the_clear(
    machine: Machine, remote: Counted, there: Path
) -> None:
    save_and_push_as(machine("a"), remote, ALICE)
    before = files_of(there)
    with pytest.raises(UsageError, match=r"another tenant.*is not encrypted"):
        turn(machine("a"), StampedEngine(), IDS, "chat", tenant=BOB)
    turn(machine("b"), StampedEngine(), IDS, "chat", tenant=BOB)
    with pytest.raises(UsageError, match="sessions of another tenant"):
        push(machine("b"), remote, BOB.tenant_id, "chat")
    assert files_of(there) == before
    b = machine("b")
    with pytest.raises(UsageError, match="needs the tenant's key"):
        push(b, remote, BOB.tenant_id, "chat", encrypt=True)
    b.keys.add(BOB)
    push(b, remote, BOB.tenant_id, "chat", encrypt=True)
    save_and_push_as(machine("c"), remote, None)


def test_the_secret_stands_in_no_object(machine: Machine, remote: Counted, there: Path) -> None:
    save_and_push_as(machine("a"), remote, ALICE)
    for key, data in files_of(there).items():
        for secret in (ALICE.key, ALICE.key.hex().encode(), ALICE.naming_key):
            assert secret not in data
            assert secret.hex() not in key


def test_a_session_moved_into_another_tenants_folder_is_refused(
    machine: Machine, remote: Counted, there: Path
) -> None:
    save_and_push_as(machine("a"), remote, ALICE)
    mine = only(there, "manifests")
    stolen = there / "manifests" / "default" / mine.name
    stolen.parent.mkdir()
    stolen.write_bytes(mine.read_bytes())
    with pytest.raises(Damaged, match="another session's"):
        pull(machine("b"), remote, "chat")


def test_a_manifest_that_claims_to_be_without_a_key_is_refused(
    machine: Machine, remote: Counted, there: Path
) -> None:
    # The session's file names its tenant too, and its root follows from neither.
    save_and_push_as(machine("a"), remote, ALICE)
    manifest = require(remote, Keyring(), ALICE.tenant_id, "chat").manifest
    assert manifest is not None
    forged = replace(manifest, tenant_id="default")
    session = only(there, "sessions")
    place = there / forged.item_key(forged.session)
    place.parent.mkdir(parents=True)
    place.write_bytes(session.read_bytes())
    put_manifest(remote, forged)
    b = machine("b")
    with pytest.raises(KvsnapError):
        pull(b, remote, "chat")
    assert not b.place.sessions.exists()


def test_a_header_that_claims_another_tenant_is_refused(
    machine: Machine, remote: Counted, there: Path
) -> None:
    save_and_push_as(machine("a"), remote, None)
    rewrite(only(there, "manifests"), tenant_id="../../../../etc")
    with pytest.raises(Damaged, match="tenant id"):
        pull(machine("b"), remote, "chat")
