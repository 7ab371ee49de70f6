"""Damage to sealed files, by chance or on purpose: a miss with a reason, never wrong rows, and the next
save mends it. What another tenant has is left alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.container import Tensor
from kvsnap.formats.errors import Damaged, KvsnapError, NotFound, Unsupported
from kvsnap.formats.sealed import parse_sealed
from kvsnap.formats.session_name import session_file_name
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.doctor import examine
from kvsnap.kvstore.gc import gc
from kvsnap.kvstore.opener import Opener
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.session_file import open_session
from kvsnap.kvstore.stats import stats
from kvsnap.kvstore.verify import verify_session, verify_store
from kvsnap.testing.recount import assert_counts
from tests.planting import other_rows, session_with_other_tail, with_header, with_tensors
from tests.sealed_places import (
    BLOCK,
    NAME,
    engine,
    open_encrypted,
    reseal,
    restored,
    save,
    secret_ids,
)
from tests.tenants import ALICE, BOB

IDS = secret_ids(6 * BLOCK + 9, 1)
THIRD = 2
"""The block that is damaged; two stand before it."""
CAROL = Tenant(bytes(range(7, 39)))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "s"
    with open_encrypted(path) as store:
        for tenant in (ALICE, BOB):
            save(store, IDS, NAME, tenant)
            save(store, IDS[:40], "another-name", tenant)
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    """A store in which two tenants have the same prompt."""
    return Path(shutil.copytree(template, tmp_path / "s"))


def blocks_of(path: Path, tenant: Tenant) -> list[Path]:
    """A tenant's files, the front of the chain first."""
    files = [(read_record(file), file) for file in path.glob("blocks/*/*")]
    own = [(f.record.start, file) for f, file in files if f.sealed_for == tenant.tenant_id]
    return [file for _, file in sorted(own)]


def session_of(path: Path, tenant: Tenant, name: str = NAME) -> Path:
    with open_encrypted(path) as store:
        store.keys.add(tenant)
        return store.sessions.path(tenant.tenant_id, name)


def all_of(path: Path, tenant: Tenant) -> dict[Path, bytes]:
    sessions = path.glob(f"sessions/{tenant.tenant_id}/*")
    return {file: file.read_bytes() for file in (*blocks_of(path, tenant), *sessions)}


def aside(path: Path) -> list[str]:
    """What stands in quarantine, by the name of each file."""
    found = path.glob("quarantine/*")
    return sorted(file.name.split(".")[0] for file in found if file.suffix != ".reason")


def flipped(data: bytes, at: int, bit: int = 1) -> bytes:
    changed = bytearray(data)
    changed[at] ^= bit
    return bytes(changed)


def sealed_part(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Changes to the ciphertext, or to the tag behind it, in a file that is right by its digest."""

    def changed(data: bytes) -> bytes:
        def put(tensors: dict[str, Tensor]) -> None:
            new = change(bytes(tensors["sealed"].data))
            tensors["sealed"] = Tensor("U8", (len(new),), new)

        return with_tensors(data, put)

    return changed


def fields(**changes: str) -> Callable[[bytes], bytes]:
    return lambda data: with_header(data, **changes)


def one_more_tensor(data: bytes) -> bytes:
    numbers = np.arange(4, dtype="<u4")
    return with_tensors(data, lambda tensors: tensors.update(more=Tensor("U32", (4,), numbers)))


def not_sealed(data: bytes) -> bytes:
    return with_header(data, kind="block")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of the header": lambda data: flipped(data, 300),
    "a bit of the rows": lambda data: flipped(data, len(data) - 100),
    "the last bit": lambda data: flipped(data, len(data) - 1, 128),
    "cut short": lambda data: data[: len(data) // 2],
    "cut in its header": lambda data: data[:200],
    "the last byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "ciphertext": sealed_part(lambda sealed: flipped(sealed, 700)),
    "tag": sealed_part(lambda sealed: flipped(sealed, len(sealed) - 1)),
    "shorter inside": sealed_part(lambda sealed: sealed[:-40]),
    "nothing inside": sealed_part(lambda sealed: sealed[:8]),
    "salt": fields(salt="ab" * 32),
    "name": fields(name="ab" * 32),
    "parent": fields(parent="ab" * 32),
    "first of its chain": fields(parent="00" * 32, start="0"),
    "root": fields(root_id="ab" * 32),
    "start": fields(start="16"),
    "start far off": fields(start=str(2**40)),
    "fewer tokens": fields(tokens="1"),
    "more tokens": fields(tokens="65536"),
    "another tenant, whose key is known": fields(tenant_id=BOB.tenant_id),
    "a tenant whose key nobody has": fields(tenant_id=CAROL.tenant_id),
    "no tenant": fields(tenant_id="default"),
    "signer": fields(signer="ab" * 32),
    "last": fields(last="ab" * 32),
    "a state": fields(holds="state"),
    "a session": fields(holds="session", name="", parent="", tokens="0"),
    "another cipher": fields(cipher="rot13"),
    "a newer version": fields(kvsnap="999"),
    "one more field": fields(more="ab"),
    "one more tensor": one_more_tensor,
    "no sealed file": not_sealed,
}


def heals(path: Path) -> None:
    """Saving what is damaged makes it whole, for whoever comes next."""
    with open_encrypted(path) as store:
        assert restored(store, IDS, tenant=ALICE) < 6 * BLOCK
        save(store, IDS, NAME, ALICE, codec="raw")
    for file in path.glob("index.sqlite3*"):
        file.unlink()
    with open_encrypted(path) as store:
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
        report = verify_store(store, ALICE)
        assert (report.bad, report.unreachable, report.sealed) == ([], [], 0)
        assert_counts(store)


@pytest.mark.parametrize("rebuilt", [False, True], ids=["", "index built anew"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_block_is_a_miss_and_stored_anew(path: Path, how: str, rebuilt: bool) -> None:
    file, bobs = blocks_of(path, ALICE)[THIRD], all_of(path, BOB)
    genuine = file.read_bytes()
    file.write_bytes(DAMAGE[how](genuine))
    assert file.read_bytes() != genuine
    for index in path.glob("index.sqlite3*") if rebuilt else ():
        index.unlink()
    with open_encrypted(path) as store:
        store.keys.add(BOB)
        new = engine()
        report = Session(store, new, NAME, tenant=ALICE).resume(IDS, leave=0)
        new.check_rows()
        assert report.reused_tokens == THIRD * BLOCK
        assert report.damage or rebuilt, "an index from the files knows of no file there"
        assert all("\n" not in line for line in report.damage)
    with open_encrypted(path) as store:
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)
    heals(path)
    assert all(name == file.stem for name in aside(path))
    assert all_of(path, BOB) == bobs


@pytest.mark.parametrize("how", DAMAGE)
def test_verify_finds_a_damaged_block_with_the_key(path: Path, how: str) -> None:
    file = blocks_of(path, ALICE)[THIRD]
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    with open_encrypted(path) as store:
        found = verify_session(store, ALICE.tenant_id, NAME, ALICE)
    assert [bad.path for bad in found.bad] == [str(file)]
    assert "\n" not in found.bad[0].reason


@pytest.mark.parametrize("how", [how for how in DAMAGE if how != "a session"])
def test_a_damaged_session_is_told_and_replaced(path: Path, how: str) -> None:
    file, bobs = session_of(path, ALICE), all_of(path, BOB)
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    with open_encrypted(path) as store:
        store.keys.add(ALICE)
        with pytest.raises((Damaged, Unsupported)) as told:
            store.sessions.load(ALICE.tenant_id, NAME)
        assert "\n" not in str(told.value)
        new = engine()
        try:
            session = Session(store, new, NAME, tenant=ALICE)
        except Unsupported:
            assert how in ("another cipher", "a newer version")
            return  # a newer kvsnap's file is nobody's to replace
        report = session.resume(IDS)
        new.check_rows()
        assert report.reused_tokens == 6 * BLOCK, "its blocks are there"
        assert report.damage
        new.evaluate(IDS[6 * BLOCK :])
        session.save()
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
    assert aside(path) == [file.stem]
    assert all_of(path, BOB) == bobs


def test_no_bit_of_a_sealed_file_can_be_changed(path: Path) -> None:
    """All of them, one of each byte, as disks do it; then those of the sealed part and of each field
    in a file that is right by its digest, as somebody does it who has not the key."""
    opener = Opener()
    opener.keys.add(ALICE)
    data = blocks_of(path, ALICE)[THIRD].read_bytes()
    whole = opener.block(memoryview(data)).content
    for at in range(len(data)):
        with pytest.raises((Damaged, Unsupported)):
            opener.block(memoryview(flipped(data, at, 1 << at % 8)))
    inside = len(parse_sealed(memoryview(data))._sealed)
    for at in range(0, inside, 7):
        change = sealed_part(lambda sealed, at=at: flipped(sealed, at, 1 << at % 8))  # type: ignore[misc]
        with pytest.raises(Damaged, match="does not open"):
            opener.block(memoryview(change(data)))
    assert opener.block(memoryview(with_header(data))).content == whole, "the same, packed again"


def test_two_blocks_that_changed_places_are_both_missed(path: Path) -> None:
    one, two = blocks_of(path, ALICE)[THIRD : THIRD + 2]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with open_encrypted(path) as store:
        keyless = verify_store(store)
        assert sorted(bad.path for bad in keyless.bad) == sorted([str(one), str(two)]), (
            "that can be told without a key"
        )
        assert restored(store, IDS, NAME, tenant=ALICE) == THIRD * BLOCK
    heals(path)


def test_a_block_of_another_tenant_in_the_place_of_ones_own_is_missed(path: Path) -> None:
    """Whether or not its key is at hand; and the other tenant's own stays where it is."""
    own, others = blocks_of(path, ALICE)[THIRD], blocks_of(path, BOB)[THIRD]
    bobs = all_of(path, BOB)
    own.write_bytes(others.read_bytes())
    for tenant in (BOB, None):
        with open_encrypted(path) as store:
            store.keys.add(tenant)
            assert restored(store, IDS, NAME, tenant=ALICE) == THIRD * BLOCK
    heals(path)
    assert all_of(path, BOB) == bobs


def test_sessions_that_changed_places_are_both_told(path: Path) -> None:
    one, two = (session_of(path, ALICE, name) for name in (NAME, "another-name"))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    with open_encrypted(path) as store:
        store.keys.add(ALICE)
        for name in (NAME, "another-name"):
            with pytest.raises(Damaged, match="its file holds"):
                store.sessions.load(ALICE.tenant_id, name)
        reasons = {bad.reason for bad in verify_store(store, ALICE).bad}
        assert reasons == {"the file stands under another session's name"}
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)


def test_a_session_of_another_tenant_in_the_place_of_ones_own_is_told(path: Path) -> None:
    own, others = session_of(path, ALICE), session_of(path, BOB)
    own.write_bytes(others.read_bytes())
    for tenant in (BOB, None):
        with open_encrypted(path) as store:
            store.keys.add(tenant)
            store.keys.add(ALICE)
            with pytest.raises(Damaged):
                store.sessions.load(ALICE.tenant_id, NAME)
            with pytest.raises(NotFound, match="cannot be read"):
                Session(store, engine(), NAME, tenant=ALICE).stored_token_ids()
    with open_encrypted(path) as store:
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)


def test_a_session_of_another_tenant_is_told_without_a_key_as_well(path: Path) -> None:
    """Whose it is stands in its header, and in the name of its folder."""
    own = session_of(path, ALICE)
    own.write_bytes(with_header(own.read_bytes(), tenant_id=CAROL.tenant_id))
    with open_encrypted(path) as store:
        assert [bad.path for bad in verify_store(store).bad] == [str(own)]
        assert [one.path for one in store.listing if one.facts.problem] == [own]


def test_who_has_both_keys_at_hand_takes_no_rows_of_one_for_the_other(path: Path) -> None:
    """Somebody with a key of the store, who guesses the prompt, seals other rows under a block's name:
    a server that serves both must not use them."""
    file = blocks_of(path, ALICE)[THIRD]
    planted = reseal(file.read_bytes(), ALICE, BOB, other_rows)
    file.write_bytes(planted)
    for index in path.glob("index.sqlite3*"):
        index.unlink()
    with open_encrypted(path) as store:
        store.keys.add(BOB)
        assert store.opener.block(memoryview(planted)).record.name.hex() == file.stem, "it opens"
        report = Session(store, engine(), NAME, tenant=ALICE).resume(IDS)
        assert report.reused_tokens == THIRD * BLOCK
        assert any("another tenant's key" in line for line in report.damage)
        store.blocks.misses.clear()
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
    assert file.read_bytes() != planted


@pytest.mark.parametrize("rebuilt", [False, True], ids=["", "index built anew"])
def test_a_plain_file_in_the_place_of_a_sealed_one_is_not_used(path: Path, rebuilt: bool) -> None:
    """Who guesses the prompt needs no key to make one: all that it says of itself stands around the
    sealed file, or follows from the prompt."""
    file = blocks_of(path, ALICE)[THIRD]
    inside = bytes(parse_sealed(memoryview(file.read_bytes())).open(ALICE))
    file.write_bytes(other_rows(inside))
    for index in path.glob("index.sqlite3*") if rebuilt else ():
        index.unlink()
    with open_encrypted(path) as store:
        assert restored(store, IDS, NAME, tenant=ALICE) == THIRD * BLOCK
    heals(path)


def test_a_plain_session_in_the_place_of_a_sealed_one_gives_no_rows(path: Path) -> None:
    sealed = session_of(path, ALICE)
    inside = bytes(parse_sealed(memoryview(sealed.read_bytes())).open(ALICE))
    sealed.unlink()
    (sealed.parent / session_file_name(NAME)).write_bytes(session_with_other_tail(inside))
    with open_encrypted(path) as store:
        session = Session(store, engine(), NAME, tenant=ALICE)
        assert session.stored_token_ids().tolist() == IDS.tolist()
        assert restored(store, IDS, NAME, tenant=ALICE) == 6 * BLOCK
        save(store, IDS, NAME, ALICE)
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)


@pytest.mark.parametrize("tenant", [None, ALICE], ids=["no key", "one key"])
def test_nothing_that_cannot_be_opened_is_deleted_or_set_aside(
    path: Path, tenant: Tenant | None
) -> None:
    bobs = all_of(path, BOB)
    before = all_of(path, ALICE)
    for rebuilt in (False, True):
        for index in path.glob("index.sqlite3*") if rebuilt else ():
            index.unlink()
        with open_encrypted(path) as store:
            store.keys.add(tenant)
            report = verify_store(store)
            assert report.bad == []
            assert report.sealed == (8 if tenant else 16)
            assert gc(store).evicted == 0
            assert stats(store).blocks == 12
            levels = {finding.level for finding in examine(path)}
            assert "problem" not in levels
            list(store.listing)
            for session in store.listing:
                assert (session.facts.name is None) == (
                    tenant is None or session.path.parent.name != ALICE.tenant_id
                )
            Session(store, engine(), NAME, tenant=tenant).resume(IDS)
            for name in blocks_of(path, BOB):
                store.blocks.has(bytes.fromhex(name.stem))
            assert not store.blocks.misses, "nor is anything held against it"
    assert all_of(path, BOB) == bobs
    assert all_of(path, ALICE) == before
    assert aside(path) == []


def test_eviction_takes_sealed_blocks_of_all_without_a_key(path: Path) -> None:
    with open_encrypted(path) as store:
        used = store.space.used()
        save(store, IDS, NAME, ALICE)  # ALICE's are used last
    with open_encrypted(path, capacity=used - 12_000) as store:
        planned = gc(store, dry_run=True)
        report = gc(store)
        assert (planned.evicted, planned.freed_bytes) == (report.evicted, report.freed_bytes)
        assert report.evicted == 3
        assert report.sessions_cut == ("(sealed)",)
        assert store.space.used() <= used - 12_000
        assert_counts(store)
    assert len(blocks_of(path, BOB)) == 3
    assert len(blocks_of(path, ALICE)) == 6
    with open_encrypted(path) as store:
        assert restored(store, IDS, NAME, tenant=ALICE) == len(IDS)
        assert restored(store, IDS, NAME, tenant=BOB) == 3 * BLOCK
        save(store, IDS, NAME, BOB)
        assert restored(store, IDS, NAME, tenant=BOB) == len(IDS)


def test_a_session_file_opens_for_its_tenant_alone(path: Path) -> None:
    opener = Opener()
    data = memoryview(session_of(path, ALICE).read_bytes())
    opener.keys.add(BOB)
    with pytest.raises(KvsnapError, match="sealed"):
        open_session(data, opener.keys)
    opener.keys.add(ALICE)
    assert open_session(data, opener.keys).record.name == NAME
