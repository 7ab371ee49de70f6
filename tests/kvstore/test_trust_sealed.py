"""Signatures inside of sealed files: an encrypted store with a trust list, plants by those with the
tenant's key and by those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.formats.container import Packed
from kvsnap.formats.sealed import parse_sealed, seal
from kvsnap.formats.tenant import Tenant, parse_key
from kvsnap.kvstore.opener import clear_of_block
from kvsnap.kvstore.rebuild import read_record
from kvsnap.kvstore.remotes.folder import Folder
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.signing_key import require_signing_key
from kvsnap.kvstore.store import Store
from kvsnap.kvstore.trust_list import add
from kvsnap.kvstore.verify import verify_store
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import PLANTS, block_of, chain_files, joined
from tests.signers import STRANGER

TENANT = parse_key(b"ab" * 32)
ANOTHER = parse_key(b"cd" * 32)
IDS = some_ids(57)
MORE = [*IDS.tolist(), 1, 2, 3]
SOMEBODY = "ab" * 32
Opener = Callable[..., Store]


@pytest.fixture
def opened(store_path: Path) -> Iterator[Opener]:
    stores: list[Store] = []

    def open_it(*trust: str, encrypt: bool = True, tenant: Tenant | None = TENANT) -> Store:
        stores.append(Store(store_path, trust=trust, encrypt=encrypt))
        stores[-1].keys.add(tenant)
        return stores[-1]

    yield open_it
    for store in stores:
        store.close()


def computed(store: Store, name: str | None = "chat") -> list[int]:
    engine = StampedEngine()
    turn(store, engine, MORE, name, tenant=TENANT, save=False)
    engine.check_rows()
    return engine.positions


def inside(path: Path) -> bytes:
    return bytes(parse_sealed(memoryview(path.read_bytes())).open(TENANT))


def sealed_again(path: Path, plain: bytes, signer: str) -> bytes:
    """As somebody can who has the tenant's key."""
    packed = Packed((plain,), len(plain), "")
    clear = clear_of_block(block_of(plain).record, TENANT.tenant_id, signer)
    return joined(seal(packed, clear, TENANT))


@pytest.mark.parametrize("lying", [False, True], ids=["signer as inside", "lying outside"])
@pytest.mark.parametrize("how", PLANTS)
@pytest.mark.parametrize("rebuilt", [False, True], ids=["index there", "index rebuilt"])
def test_whoever_has_the_tenants_key_and_no_trusted_one_plants_nothing(
    opened: Opener, store_path: Path, how: str, lying: bool, rebuilt: bool
) -> None:
    store = opened(SOMEBODY)
    turn(store, StampedEngine(), IDS, "chat", tenant=TENANT, codec="raw")
    files = chain_files(store_path)
    genuine = inside(files[1])
    planted = PLANTS[how](genuine, inside(files[0]))
    signer = require_signing_key().public if lying else block_of(planted).signer
    files[1].write_bytes(sealed_again(files[1], planted, signer))
    store.close()
    if rebuilt:
        for path in store_path.glob("index.sqlite3*"):
            path.unlink()
    assert computed(opened(SOMEBODY)) == list(range(16, 60))
    store = opened(SOMEBODY)
    turn(store, StampedEngine(), IDS, "chat", tenant=TENANT, codec="raw")
    assert inside(files[1]) == genuine
    assert computed(store) == [57, 58, 59]
    assert verify_store(store, TENANT).bad == []


@pytest.mark.parametrize("how", PLANTS)
def test_so_it_is_used_without_a_list(opened: Opener, store_path: Path, how: str) -> None:
    with opened(SOMEBODY) as store:
        turn(store, StampedEngine(), IDS, "chat", tenant=TENANT, codec="raw")
    files = chain_files(store_path)
    planted = PLANTS[how](inside(files[1]), inside(files[0]))
    files[1].write_bytes(sealed_again(files[1], planted, block_of(planted).signer))
    engine = StampedEngine()
    turn(opened(), engine, MORE, "chat", tenant=TENANT, save=False)
    assert engine.positions == [57, 58, 59]
    with pytest.raises(AssertionError, match="wrong elements"):
        engine.check_rows()


def test_plain_files_and_noise_under_a_sealed_ones_name(opened: Opener, store_path: Path) -> None:
    """Without the key nobody makes one that opens, and a plain one is signed like any other, or not."""
    store = opened(SOMEBODY)
    turn(store, StampedEngine(), IDS, "chat", tenant=TENANT, codec="raw")
    path = chain_files(store_path)[1]
    genuine, plain = path.read_bytes(), inside(path)
    noise = bytearray(genuine)
    noise[-40:] = bytes(40)
    for planted in (PLANTS["unsigned"](plain, plain), bytes(noise)):
        path.write_bytes(planted)
        store = opened(SOMEBODY)
        assert computed(store) == list(range(16, 60))
        turn(store, StampedEngine(), IDS, "chat", tenant=TENANT, codec="raw")
        assert inside(path) == plain


def test_vouching_signs_what_can_be_opened_inside(opened: Opener, store_path: Path) -> None:
    store = opened()
    turn(store, StampedEngine(), IDS, "chat", tenant=TENANT)
    store.keys.add(ANOTHER)
    turn(store, StampedEngine(), some_ids(40, 4), "theirs", tenant=ANOTHER)
    store.close()
    done = add(opened(), SOMEBODY, vouch=True)
    assert (done.vouched, done.sessions) == (3, 1)
    assert done.set_aside == 2, "nobody could tell what is in the other tenant's"
    own = require_signing_key().public
    for path in chain_files(store_path):
        assert read_record(path).signer == own, "an index can be built anew"
        block = block_of(inside(path))
        assert (block.signer, block.signed) == (own, True)
    store = opened()
    assert verify_store(store, TENANT).bad == []
    assert computed(store) == [57, 58, 59]


def test_a_signed_push_of_an_encrypted_store(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, store = Folder((tmp_path / "remote").as_uri(), 5.0), opened()
    turn(store, StampedEngine(), IDS, "chat", tenant=TENANT)
    push(store, remote, TENANT.tenant_id, "chat", sign=True)
    own = require_signing_key().public
    for path in chain_files(tmp_path / "remote"):
        assert block_of(inside(path)).signer == own
    monkeypatch.setenv("KVSNAP_SIGNING_KEY_FILE", str(tmp_path / "bob.pem"))
    path = tmp_path / "bob"
    path.mkdir()
    (path / "kvsnap.json").write_bytes((store.path / "kvsnap.json").read_bytes())
    with Store(path, trust=[STRANGER.public]) as other:
        other.keys.add(TENANT)
        with pytest.raises(Exception, match=f"signed by {own}"):
            pull(other, remote, "chat", tenant=TENANT)
    with Store(path, trust=[own]) as other:
        other.keys.add(TENANT)
        pull(other, remote, "chat", tenant=TENANT)
        assert computed(other) == [57, 58, 59]
