"""Plants in a remote: before a push, after it, between push and pull, while blocks come. Never used where
a trust list is; replaced by the next signed push. Without a list they are used."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsnap.formats.block import pack_block, sign_block
from kvsnap.formats.errors import Damaged, PartlyDone, Vanished
from kvsnap.formats.manifest import BLOCK, parse_manifest
from kvsnap.kvstore.remotes.archive import Archive
from kvsnap.kvstore.remotes.counted import Counted
from kvsnap.kvstore.sharing.pull import pull
from kvsnap.kvstore.sharing.push import push
from kvsnap.kvstore.sharing.verify_remote import verify_remote
from kvsnap.kvstore.store import Store
from kvsnap.testing.aftermath import assert_clean, assert_saved
from kvsnap.testing.stamped import StampedEngine
from kvsnap.testing.turns import some_ids, turn
from tests.planting import PLANTS, block_of, chain_files, joined, plant, rows_of, with_header
from tests.sharing.hooked import Hooked
from tests.sharing.objects import ME, files_of, only
from tests.signers import STRANGER, Signers

Machine = Callable[..., Store]
IDS = some_ids(57)
MORE = np.concatenate([IDS, some_ids(7, 1)])
LIES = "quoting the genuine header"
"""The one plant whose header is right in all that can be told without reading the rows."""
every_plant = pytest.mark.parametrize("how", PLANTS)


@pytest.fixture
def keys(tmp_path: Path) -> Signers:
    return Signers(tmp_path / "keys")


@pytest.fixture
def a(machine: Machine, remote: Counted, keys: Signers) -> Store:
    """A machine that has pushed its session, signed."""
    store = machine("a")
    turn(store, StampedEngine(), IDS, "chat")
    with keys.machine("a"):
        push(store, remote, ME, "chat", sign=True)
    return store


def plant_second(folder: Path, how: str) -> tuple[Path, bytes]:
    files = chain_files(folder)
    return files[1], plant(files[1], files[0], PLANTS[how])


class Planted:
    """A plant in place of a second block, that comes just before an operation on it."""

    def __init__(self, folder: Path, how: str, operation: str = "get") -> None:
        self.folder, self.how, self.operation = folder, how, operation
        self.path, self.genuine = chain_files(folder)[1], b""

    def __call__(self, operation: str, key: str) -> None:
        if operation == self.operation and key.endswith(self.path.name) and not self.genuine:
            self.genuine = plant_second(self.folder, self.how)[1]


def positions(store: Store, name: str | None = "chat") -> list[int]:
    engine = StampedEngine()
    turn(store, engine, MORE, name, save=False)
    engine.check_rows()
    return engine.positions


def push_signed(store: Store, remote: Counted, keys: Signers, force: bool = False) -> None:
    with keys.machine("a"):
        push(store, remote, ME, "chat", sign=True, force=force)


def assert_genuine(path: Path, genuine: bytes, signer: str) -> None:
    now = block_of(path.read_bytes())
    assert (now.content, now.signer, now.signed) == (block_of(genuine).content, signer, True)
    now.check_content()


@every_plant
def test_a_plant_that_was_there_before_the_push(
    machine: Machine, remote: Counted, there: Path, keys: Signers, how: str
) -> None:
    """Somebody knows the prompt, and puts blocks under its names before anyone pushes it."""
    twin = machine("twin")
    turn(twin, StampedEngine(), IDS, "chat")
    with keys.machine("a"):
        push(twin, remote, ME, "chat", sign=True)
    path, genuine = plant_second(there, how)
    for other in (there / "manifests", there / "sessions"):
        for file in other.rglob("*.safetensors"):
            file.unlink()
    a = machine("a")
    turn(a, StampedEngine(), IDS, "chat")
    push_signed(a, remote, keys)
    b = keys.trusting(machine, "b", "a")
    if how == LIES:
        assert path.read_bytes() != genuine, "what is there is not read by a push"
        with pytest.raises(PartlyDone, match="content digest differs"):
            pull(b, remote, "chat")
        assert positions(b) == list(range(16, 64))
        assert [bad.reason for bad in verify_remote(remote, trust=b.trust).bad] != []
        push_signed(a, remote, keys, force=True)
    assert_genuine(path, genuine, keys.public("a"))
    pull(b, remote, "chat")
    assert positions(b) == list(range(57, 64))
    assert_clean(b)


@every_plant
def test_a_plant_after_the_push_is_not_pulled_and_the_next_push_replaces_it(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    path, genuine = plant_second(there, how)
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone, match="cannot be used"):
        pull(b, remote, "chat")
    assert positions(b) == list(range(16, 64))
    push_signed(a, remote, keys, force=how == LIES)
    assert_genuine(path, genuine, keys.public("a"))
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


def made_up(data: bytes) -> bytes:
    signature = block_of(data).signature
    assert signature is not None
    return with_header(data, **replace(signature, value="5" * 128).fields())


def by_a_stranger(data: bytes) -> bytes:
    return joined(sign_block(memoryview(data), STRANGER))


def unsigned(data: bytes) -> bytes:
    block = block_of(data)
    return joined(pack_block(block.record, block.codec, block.layout(), rows_of(data)))


@pytest.mark.parametrize("how", [made_up, by_a_stranger, unsigned], ids=lambda how: how.__name__)
def test_right_rows_that_nobody_trusted_signed_are_replaced_too(
    machine: Machine,
    remote: Counted,
    there: Path,
    keys: Signers,
    a: Store,
    how: Callable[[bytes], bytes],
) -> None:
    """Nobody who asks for signatures can use them."""
    path = chain_files(there)[1]
    genuine = path.read_bytes()
    path.write_bytes(how(genuine))
    assert block_of(path.read_bytes()).content == block_of(genuine).content
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone, match="no trusted key signed it"):
        pull(b, remote, "chat")
    push_signed(a, remote, keys)
    assert path.read_bytes() == genuine
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


@every_plant
def test_without_a_list_a_plant_that_is_right_by_its_digests_is_pulled_and_used(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    """By read-through, where no manifest tells of the content; a plant whose `content` is not that of
    its rows is found in any case."""
    plant_second(there, how)
    c = machine("c", remote=remote)
    engine = StampedEngine()
    turn(c, engine, MORE, save=False)
    if how == LIES:
        engine.check_rows()
        return
    assert engine.positions == list(range(48, 64))
    with pytest.raises(AssertionError, match="wrong elements"):
        engine.check_rows()


@every_plant
def test_a_plant_between_push_and_pull_that_comes_after_the_manifest_was_read(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    planted = Planted(there, how)
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone):
        pull(b, Hooked(remote, planted), "chat")
    assert planted.genuine
    assert positions(b) == list(range(16, 64))


@every_plant
def test_a_plant_during_read_through(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    planted = Planted(there, how)
    b = keys.trusting(machine, "b", "a", remote=Hooked(remote, planted))
    assert positions(b, None) == list(range(16, 64))
    assert planted.genuine
    assert [block_of(p.read_bytes()).signer for p in chain_files(b.path)] == [keys.public("a")]
    push_signed(a, remote, keys, force=how == LIES)
    assert_genuine(planted.path, planted.genuine, keys.public("a"))
    c = keys.trusting(machine, "c", "a", remote=remote)
    assert positions(c, None) == list(range(48, 64))


@every_plant
def test_a_plant_is_replaced_by_what_goes_there_in_the_background(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    path, genuine = plant_second(there, how)
    b = keys.trusting(machine, "b", "a", remote=remote, write_behind=True)
    engine = StampedEngine()
    turn(b, engine, MORE, "mine")
    engine.check_rows()
    assert engine.positions == list(range(16, 64))
    b.flush()
    if how == LIES:
        assert path.read_bytes() != genuine
        return
    assert_genuine(path, genuine, keys.public("b"))
    c = keys.trusting(machine, "c", "b")
    with pytest.raises(PartlyDone):  # it trusts B alone, and the first block is A's
        pull(c, remote, "mine")
    d = keys.trusting(machine, "d", "a", "b")
    pull(d, remote, "mine")
    assert_saved(d, MORE, "mine")


@every_plant
def test_blocks_without_a_session_replace_a_plant_in_the_background(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store, how: str
) -> None:
    path, genuine = plant_second(there, how)
    b = keys.trusting(machine, "b", "a", remote=remote, write_behind=True)
    turn(b, StampedEngine(), MORE)
    b.flush()
    if how != LIES:
        assert_genuine(path, genuine, keys.public("b"))


@every_plant
def test_a_plant_in_a_portable_file(
    machine: Machine, keys: Signers, a: Store, tmp_path: Path, how: str
) -> None:
    whole, unpacked = tmp_path / "s.kvsnap", tmp_path / "unpacked"
    with keys.machine("a"), Archive.create(whole) as archive:
        push(a, archive, ME, "chat", sign=True)
    with tarfile.open(whole) as tar:
        names = tar.getnames()
        tar.extractall(unpacked, filter="data")
    plant_second(unpacked, how)
    spoilt = tmp_path / "t.kvsnap"
    with tarfile.open(spoilt, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name in names:
            tar.add(unpacked / name, name)
    b, c = keys.trusting(machine, "b", "a"), keys.trusting(machine, "c", "a")
    with Archive.open(spoilt) as archive, pytest.raises(PartlyDone, match="cannot be used"):
        pull(b, archive, "chat")
    assert positions(b) == list(range(16, 64))
    with Archive.open(whole) as archive:
        pull(c, archive, "chat")
    assert positions(c) == list(range(57, 64))


@every_plant
def test_a_plant_in_the_store_that_pushes(
    machine: Machine, remote: Counted, there: Path, keys: Signers, how: str
) -> None:
    """With a list it is set aside and not pushed; the session goes without it."""
    a = keys.trusting(machine, "a", "z")
    turn(a, StampedEngine(), IDS, "chat")
    path, genuine = plant_second(a.path, how)
    fresh = keys.trusting(machine, "a", "z")
    with pytest.raises(PartlyDone, match="2 of 3 blocks"):
        push(fresh, remote, ME, "chat")
    assert len(chain_files(there)) == 1
    turn(fresh, StampedEngine(), IDS, "chat")
    push(fresh, remote, ME, "chat")
    assert_genuine(path, genuine, keys.public("a"))
    b = keys.trusting(machine, "b", "a")
    pull(b, remote, "chat")
    assert_saved(b, IDS, "chat")


@every_plant
def test_a_plant_in_the_store_between_two_steps_of_its_push(
    machine: Machine, remote: Counted, there: Path, keys: Signers, how: str
) -> None:
    """After it was looked at, before it is read to be sent."""
    a = keys.trusting(machine, "a", "z")
    turn(a, StampedEngine(), IDS, "chat")
    planted = Planted(a.path, how, "size")
    with pytest.raises((Damaged, Vanished), match=r"damaged here|changed while"):
        push(a, Hooked(remote, planted), ME, "chat")
    assert planted.genuine
    trust = a.trust
    assert trust is not None
    for file in chain_files(there):
        block = block_of(file.read_bytes())
        trust.check_block(block, block.file_digest)
    assert not any(key.startswith("manifests/") for key in files_of(there))


def test_a_plant_of_a_block_that_went_here_is_vouched_for_by_no_manifest(
    machine: Machine, remote: Counted, there: Path, keys: Signers, a: Store
) -> None:
    """Blocks that are still there stay in the manifest, with the rows that they had here."""
    for path in chain_files(a.path)[1:]:
        path.unlink()
    for index in a.path.glob("index.sqlite3*"):
        index.unlink()
    path, genuine = plant_second(there, "unsigned")
    with keys.machine("a"), pytest.raises(PartlyDone, match="2 of 3 blocks were evicted"):
        push(machine("a"), remote, ME, "chat", sign=True)
    named = parse_manifest(memoryview(only(there, "manifests").read_bytes())).of_kind(BLOCK)
    contents = [item.content.hex() for item in named]
    assert block_of(path.read_bytes()).content not in contents
    b = keys.trusting(machine, "b", "a")
    with pytest.raises(PartlyDone):
        pull(b, remote, "chat")
    assert positions(b) == list(range(16, 64))
    assert path.read_bytes() != genuine
