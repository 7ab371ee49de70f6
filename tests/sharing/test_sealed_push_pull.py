"""Sessions through sealed remotes: from any store into any store, and nothing of them is told on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsnap.formats.errors import (
    Damaged,
    Diverged,
    NotFound,
    PartlyDone,
    Untrusted,
    UsageError,
)
from kvsnap.formats.sealed import is_sealed
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.remotes.archive import Archive
from kvsnap.kvstore.remotes.base import Remote
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.remove import remove
from kvsnap.kvstore.sharing.sweep import sweep
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.memory_remote import MemoryRemote
from kvsnap.testing.untaught import untaught
from tests.sealed_places import (
    ARCHITECTURE,
    BLOCK,
    NAME,
    WEIGHTS,
    Told,
    engine,
    everything,
    leaks,
    open_encrypted,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE, BOB

IDS = secret_ids(5 * BLOCK + 9, 1)
MORE = np.concatenate([IDS, secret_ids(2 * BLOCK, 2)])
OTHER = np.concatenate([IDS[: 3 * BLOCK], secret_ids(2 * BLOCK + 3, 3)])
ME = ALICE.tenant_id
OPENED = Callable[..., Store]


@pytest.fixture
def told() -> Told:
    found = Told(ids=[MORE, OTHER])
    found.texts += [WEIGHTS, ARCHITECTURE]
    found.add_rows(MORE)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Any]:
    """Opens a machine's store; `encrypt` False makes it a plain one."""

    def open_it(name: str, encrypt: bool = True, **options: Any) -> Store:
        return open_encrypted(tmp_path / name, encrypt=encrypt, **options)

    return open_it


def parts(remote: MemoryRemote) -> list[tuple[str, bytes]]:
    """What somebody sees who may list it and read it."""
    keys = [(f"the name of {key}", key.encode()) for key in remote.objects]
    return [*keys, *((key, found.data) for key, found in remote.objects.items())]


def assert_sealed(remote: MemoryRemote, told: Told) -> None:
    """Every object, and nothing of it is told; calibrations are nobody's."""
    found = leaks(told, parts(remote))
    assert not found, found[:10]
    for key, one in remote.objects.items():
        assert is_sealed(memoryview(one.data)) or key.startswith("calibrations/"), key
    assert remote.objects


def pushed(open_store: OPENED, remote: Remote, *, encrypt: bool, ids: Any = IDS) -> None:
    """From an encrypted store, or from a plain one with the option."""
    with open_store("a", encrypt=encrypt) as a:
        save(a, ids, NAME, ALICE)
        push(a, remote, ME, NAME, encrypt=True)


@pytest.mark.parametrize("target", [False, True], ids=["into a plain one", "into an encrypted one"])
@pytest.mark.parametrize("source", [False, True], ids=["from a plain one", "from an encrypted one"])
def test_a_sealed_session_comes_whole(
    store: OPENED, told: Told, tmp_path: Path, source: bool, target: bool
) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=source)
    assert_sealed(remote, told)
    with store("b", encrypt=target) as b:
        with pytest.raises(NotFound):
            pull(b, remote, NAME)
        with pytest.raises(NotFound):
            pull(b, remote, NAME, tenant=BOB)
        report = pull(b, remote, NAME, tenant=ALICE)
        assert (report.moved_files, report.stored_blocks) == (5, 5)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
        assert pull(b, remote, NAME, tenant=ALICE).moved_files == 0
        pull(b, remote, NAME, tenant=ALICE, new_name="under/a-name-of-its-own")
        assert restored(b, IDS, "under/a-name-of-its-own", tenant=ALICE) == len(IDS)
        assert verify_store(b, ALICE).bad == []
    if target:
        told.texts.append("under/a-name-of-its-own")
        assert leaks(told, everything(tmp_path / "b")) == []
    with store("b", encrypt=target) as b:
        b.keys.add(ALICE)
        save(b, MORE, NAME, ALICE)
        push(b, remote, ME, NAME)
    assert_sealed(remote, told)
    with store("a", encrypt=source) as a:
        pull(a, remote, NAME, tenant=ALICE)
        assert restored(a, MORE, NAME, tenant=ALICE) == len(MORE)


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_there_does_not_move_again(store: OPENED, encrypt: bool) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=encrypt)
    before = dict(remote.objects)
    with store("a", encrypt=encrypt) as a:
        a.keys.add(ALICE)
        report = push(a, remote, ME, NAME, encrypt=True)
        assert (report.moved_files, report.moved_bytes, report.files) == (0, 0, 6)
        assert remote.objects == before
        save(a, MORE, NAME, ALICE)
        report = push(a, remote, ME, NAME, encrypt=True)
        assert report.moved_files == 3
    kept = {key: one for key, one in remote.objects.items() if key in before}
    assert sum(kept[key] != before[key] for key in kept) == 1, "the manifest alone"


def test_a_plain_session_is_none_for_an_encrypted_store(store: OPENED) -> None:
    """Whoever may write there could have made it. A push with the key's store seals it."""
    remote = MemoryRemote()
    with store("a", encrypt=False) as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME)
    with store("b") as b, pytest.raises(Untrusted, match="neither sealed nor signed"):
        pull(b, remote, NAME, tenant=ALICE)
    with store("c", encrypt=False) as c:
        pull(c, remote, NAME, tenant=ALICE)
        assert restored(c, IDS, NAME, tenant=ALICE) == len(IDS)


KINDS: dict[str, dict[str, Any]] = {
    "window": {"window": 24},
    "recurrent": {"recurrent": 40},
    "both": {"window": 8, "recurrent": 16},
}


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_state_checkpoints_go_along(store: OPENED, told: Told, kind: str, encrypt: bool) -> None:
    options, remote = KINDS[kind], MemoryRemote()
    with store("a", encrypt=encrypt) as a:
        model = engine(**options)
        with Session(a, model, NAME, tenant=ALICE) as session:
            for stop in (30, 2 * BLOCK, len(IDS)):
                model.evaluate(IDS[len(model.token_ids()) : stop])
                session.checkpoint()
            session.save()
        assert push(a, remote, ME, NAME, encrypt=True).files == 5 + 3 + 1
        assert push(a, remote, ME, NAME, encrypt=True).moved_files == 0
    assert_sealed(remote, told)
    with store("b") as b:
        pull(b, remote, NAME, tenant=ALICE)
        for stop, reused in ((len(IDS) + 1, len(IDS)), (50, 2 * BLOCK), (31, 30)):
            new = engine(**options)
            report = Session(b, new, tenant=ALICE).resume([*IDS, 7][:stop])
            new.check_rows()
            assert report.reused_tokens == reused


@pytest.mark.parametrize("codec", ["q8", "q4", "kvtc"])
def test_lossy_sessions_and_their_calibration_go_along(
    store: OPENED, told: Told, codec: str
) -> None:
    remote = MemoryRemote()
    with store("a") as a:
        a.calibrations.put(untaught(engine().layout, WEIGHTS))
        save(a, IDS, NAME, ALICE, codec=codec)
        push(a, remote, ME, NAME)
        first = engine()
        Session(a, first, NAME, tenant=ALICE).resume([*IDS, 7])
    told.texts.remove(WEIGHTS)  # a calibration says of which model it is
    assert_sealed(remote, told)
    with store("b") as b:
        pull(b, remote, NAME, tenant=ALICE)
        new = engine()
        report = Session(b, new, NAME, tenant=ALICE).resume([*IDS, 7])
        assert (report.reused_tokens, report.damage) == (len(IDS), ())
        for name, rows in first.export(0, len(IDS)).items():
            assert np.array_equal(rows, new.export(0, len(IDS))[name])


@pytest.mark.parametrize("encrypt", [False, True])
def test_an_exported_file_is_sealed_as_well(
    store: OPENED, told: Told, tmp_path: Path, encrypt: bool
) -> None:
    path = tmp_path / "exported.kvsnap"
    with store("a", encrypt=encrypt) as a:
        save(a, IDS, NAME, ALICE)
        with Archive.create(path) as archive:
            push(a, archive, ME, NAME, encrypt=True)
    assert leaks(told, [("the file", path.read_bytes())]) == []
    with Archive.open(path) as archive, store("b") as b:
        with pytest.raises(NotFound):
            pull(b, archive, NAME)
        pull(b, archive, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
        assert verify_remote(archive, tenant=ALICE).bad == []


@pytest.mark.parametrize("target", [False, True], ids=["plain", "encrypted"])
def test_read_through_a_sealed_remote(store: OPENED, told: Told, target: bool) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True)
    with store("b", encrypt=target, remote=remote) as b:
        assert restored(b, IDS, tenant=ALICE) == 5 * BLOCK
        assert restored(b, IDS, tenant=BOB) == 0
        assert restored(b, IDS) == 0
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
    with store("b", encrypt=target) as b:
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS), "it is here from now on"


def test_read_through_a_plain_remote_is_for_plain_stores(store: OPENED) -> None:
    remote = MemoryRemote()
    with store("a", encrypt=False) as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME)
    with store("b", encrypt=False, remote=remote) as b:
        assert restored(b, IDS, tenant=ALICE) == 5 * BLOCK
    with store("c", remote=remote) as c:
        session = Session(c, engine(), NAME, tenant=ALICE)
        report = session.resume(IDS)
        assert report.reused_tokens == 0
        assert report.damage
        session.engine.evaluate(IDS)
        session.save()
        assert restored(c, IDS, NAME, tenant=ALICE) == len(IDS)


def test_write_behind_seals_what_an_encrypted_store_saves(store: OPENED, told: Told) -> None:
    remote = MemoryRemote()
    with store("a", remote=remote, write_behind=True) as a:
        for ids in (IDS[:30], IDS, MORE, OTHER, IDS[: 2 * BLOCK]):  # also back, and elsewhere
            save(a, ids, NAME, ALICE)
            a.flush()
            assert verify_remote(remote, tenant=ALICE).bad == []
        save(a, MORE, None, ALICE)  # blocks that no session names
        a.flush()
    assert_sealed(remote, told)
    assert len([key for key in remote.objects if key.startswith("manifests/")]) == 1
    with store("b", remote=remote) as b:
        assert restored(b, IDS[: 2 * BLOCK], NAME, tenant=ALICE) == 2 * BLOCK
        assert restored(b, MORE, tenant=ALICE) == 7 * BLOCK


def test_what_is_sealed_there_stays_sealed(store: OPENED, told: Told) -> None:
    """Whoever forgets the option once does not lay it open."""
    remote = MemoryRemote()
    pushed(store, remote, encrypt=False)
    with store("a", encrypt=False) as a:
        save(a, MORE, NAME, ALICE)
        push(a, remote, ME, NAME)
        push(a, remote, ME, NAME, force=True)
    assert_sealed(remote, told)
    with store("b", encrypt=False, remote=remote, write_behind=True) as b:
        b.find_session(NAME, ALICE)
        save(b, OTHER, NAME, ALICE)
        b.flush()
    assert_sealed(remote, told)
    with store("c") as c:
        pull(c, remote, NAME, tenant=ALICE)
        assert restored(c, OTHER, NAME, tenant=ALICE) == len(OTHER)


def test_two_sessions_of_one_prefix_one_of_them_sealed(store: OPENED) -> None:
    """Their blocks are shared, and good for both: neither push breaks the other's session."""
    remote = MemoryRemote()
    with store("a", encrypt=False) as a:
        save(a, IDS, NAME, ALICE)
        save(a, OTHER, "open", ALICE)
        for _ in range(2):
            push(a, remote, ME, "open")
            push(a, remote, ME, NAME, encrypt=True)
            assert verify_remote(remote, tenant=ALICE).bad == []
            assert push(a, remote, ME, "open").moved_files == 0
            assert push(a, remote, ME, NAME).moved_files == 0
    with store("b") as b:
        pull(b, remote, NAME, tenant=ALICE)
        assert restored(b, IDS, NAME, tenant=ALICE) == len(IDS)
    with store("c", encrypt=False) as c:
        pull(c, remote, "open", tenant=ALICE)
        assert restored(c, OTHER, "open", tenant=ALICE) == len(OTHER)


def test_sessions_that_parted_are_refused(store: OPENED) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True, ids=MORE)
    before = {key: one for key, one in remote.objects.items() if key.startswith("manifests/")}
    with store("b") as b:
        save(b, OTHER, NAME, ALICE)
        with pytest.raises(Diverged, match="has another"):
            push(b, remote, ME, NAME)
        with pytest.raises(Diverged):
            pull(b, remote, NAME, tenant=ALICE)
        assert {k: one for k, one in remote.objects.items() if k.startswith("manifests/")} == before
        pull(b, remote, NAME, tenant=ALICE, new_name="theirs")
        push(b, remote, ME, NAME, force=True)
    with store("c") as c:
        pull(c, remote, NAME, tenant=ALICE)
        assert restored(c, OTHER, NAME, tenant=ALICE) == len(OTHER)


def test_two_tenants_have_one_name_and_one_prompt(store: OPENED, told: Told) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True)
    alices = dict(remote.objects)
    with store("b") as b:
        save(b, IDS, NAME, BOB)
        assert push(b, remote, BOB.tenant_id, NAME).moved_files == 6
        save(b, MORE, NAME, BOB)
        push(b, remote, BOB.tenant_id, NAME)
        push(b, remote, BOB.tenant_id, NAME, force=True)
        assert {key: remote.objects[key] for key in alices} == alices
        remove(remote, b.keys, BOB.tenant_id, [NAME])
    sweep(remote, grace_days=0)
    assert remote.objects.keys() == alices.keys()
    assert {key: remote.objects[key] for key in alices} == alices
    assert_sealed(remote, told)
    with store("c") as c:
        pull(c, remote, NAME, tenant=ALICE)
        assert restored(c, IDS, NAME, tenant=ALICE) == len(IDS)
        with pytest.raises(NotFound):
            pull(c, remote, NAME, tenant=BOB)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
def test_a_second_key_is_refused_in_the_clear_and_nothing_was_written(
    store: OPENED, sealed: bool
) -> None:
    remote = MemoryRemote()
    with store("a", encrypt=False) as a:
        save(a, IDS, NAME, ALICE)
        push(a, remote, ME, NAME, encrypt=sealed)
    before = dict(remote.objects)
    with store("b", encrypt=False, remote=remote, write_behind=True) as b:
        for name in (NAME, None):
            save(b, IDS, name, BOB)
            with pytest.raises(UsageError, match="another tenant") as refused:
                b.flush()
            assert "--encrypt" in refused.value.hint
        for dry_run in (True, False):
            with pytest.raises(UsageError):
                push(b, remote, BOB.tenant_id, NAME, dry_run=dry_run)
        assert remote.objects == before
        push(b, remote, BOB.tenant_id, NAME, encrypt=True)
        assert {key: remote.objects[key] for key in before} == before
    with store("c", encrypt=False) as c:
        save(c, IDS, NAME, None)
        push(c, remote, "default", NAME)  # who has no key hides nothing


def test_who_has_no_key_seals_nothing(store: OPENED) -> None:
    remote = MemoryRemote()
    with store("a", encrypt=False) as a:
        save(a, IDS, NAME, None)
        with pytest.raises(UsageError, match="no tenant key was given"):
            push(a, remote, "default", NAME, encrypt=True)
    assert not remote.objects


def test_verify_says_what_it_could_not_look_into(store: OPENED) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True)
    whole = verify_remote(remote, tenant=ALICE)
    assert (whole.checked, whole.bad, whole.unreachable) == (7, [], [])
    assert verify_remote(remote, tenant=ALICE, name=NAME).checked == 7
    for tenant in (None, BOB):
        report = verify_remote(remote, tenant=tenant)
        assert report.bad == []
        assert len(report.unreachable) == (tenant is None)
    with pytest.raises(NotFound):
        verify_remote(remote, tenant=BOB, name=NAME)


def change(remote: MemoryRemote, key: str, data: bytes) -> None:
    remote.put(key, data)


def blocks(remote: MemoryRemote, tenant: Tenant, ids: Any = IDS) -> list[str]:
    """Keys of a tenant's blocks, in the order of the chain."""
    from kvsnap.formats.identity import root_of
    from kvsnap.formats.manifest import block_key
    from kvsnap.formats.names import chain_names

    root = root_of(engine().identity(BLOCK, str), tenant)
    return [block_key(name) for name in chain_names(root.key, ids, BLOCK)]


@pytest.mark.parametrize(
    "how", ["a bit", "cut", "gone", "the next one's", "another tenant's", "in the clear"]
)
def test_a_damaged_block_makes_it_shorter_and_a_push_mends_it(store: OPENED, how: str) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True)
    with store("b") as b:
        save(b, IDS, NAME, BOB)
        push(b, remote, BOB.tenant_id, NAME)
    with store("p", encrypt=False) as p:
        save(p, IDS, NAME, ALICE, codec="raw")
        push(p, plain := MemoryRemote("plain"), ME, NAME)
    key, after = blocks(remote, ALICE)[2:4]
    data = remote.objects[key].data
    if how == "gone":
        remote.delete(key)
    else:
        changed = {
            "a bit": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
            "cut": data[:-100],
            "the next one's": remote.objects[after].data,
            "another tenant's": remote.objects[blocks(remote, BOB)[2]].data,
            "in the clear": plain.objects[key].data,
        }
        change(remote, key, changed[how])
    with store("c") as c:
        report = verify_remote(remote, tenant=ALICE)
        assert [bad.path for bad in report.bad] == [key]
        c.keys.add(BOB)
        with pytest.raises(PartlyDone) as partly:
            pull(c, remote, NAME, tenant=ALICE)
        assert "\n" not in partly.value.what
        assert restored(c, IDS, NAME, tenant=ALICE) == 2 * BLOCK
    with store("d", remote=remote) as d:
        assert restored(d, IDS, tenant=ALICE) == 2 * BLOCK
    with store("a") as a:
        a.keys.add(ALICE)
        push(a, remote, ME, NAME, force=True)
    assert verify_remote(remote, tenant=ALICE).bad == []
    with store("e") as e:
        pull(e, remote, NAME, tenant=ALICE)
        assert restored(e, IDS, NAME, tenant=ALICE) == len(IDS)


@pytest.mark.parametrize("what", ["manifests/", "sessions/"])
def test_a_damaged_session_is_told_and_a_push_mends_it(store: OPENED, what: str) -> None:
    remote = MemoryRemote()
    pushed(store, remote, encrypt=True)
    (key,) = (key for key in remote.objects if key.startswith(what))
    whole = remote.objects[key].data
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        change(remote, key, whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with store("c") as c, pytest.raises((Damaged, NotFound)) as told:
            pull(c, remote, NAME, tenant=ALICE)
        assert "\n" not in told.value.what
        if what == "manifests/":
            with pytest.raises(Damaged):
                sweep(remote, grace_days=0)
    assert len(remote.objects) == 7, "a sweep that cannot read a manifest removes nothing"
    with store("a") as a:
        a.keys.add(ALICE)
        push(a, remote, ME, NAME, force=True)
    assert verify_remote(remote, tenant=ALICE).bad == []


def test_manifests_of_two_sessions_that_changed_places_are_told(store: OPENED) -> None:
    remote = MemoryRemote()
    with store("a") as a:
        for name in (NAME, "another-name"):
            save(a, IDS, name, ALICE)
            push(a, remote, ME, name)
    one, two = (key for key in remote.objects if key.startswith("manifests/"))
    first, second = remote.objects[one].data, remote.objects[two].data
    change(remote, one, second)
    change(remote, two, first)
    with store("b") as b:
        for name in (NAME, "another-name"):
            with pytest.raises(Damaged, match="another session's"):
                pull(b, remote, name, tenant=ALICE)


def test_in_a_folder_as_well(store: OPENED, told: Told, tmp_path: Path) -> None:
    remote = Folder((tmp_path / "remote").as_uri(), 5.0)
    pushed(store, remote, encrypt=True)
    with store("a") as a:
        save(a, MORE, NAME, ALICE)
        push(a, remote, ME, NAME)
    assert leaks(told, everything(tmp_path / "remote")) == []
    before = {where for where, _ in everything(tmp_path / "remote")}
    report = sweep(remote, grace_days=0)
    assert (report.sessions, report.removed_files) == (1, 1), "the session's file of before"
    after = {where for where, _ in everything(tmp_path / "remote")}
    assert len({where for where in before - after if where.endswith("safetensors")}) == 2
    assert verify_remote(remote, tenant=ALICE).bad == []
